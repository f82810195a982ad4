"""The keyword options that the functions share. The type and the description of each stand here,
its default in the operators' schemas; signatures and docstrings are completed from both."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from torch import Tensor
from torch._ops import OpOverload
from typing_extensions import TypedDict, Unpack, get_type_hints

__all__ = ["HardOptions", "ScoreOptions", "SoftmaxOptions", "TangentOptions", "Unpack"]
Function = TypeVar("Function", bound=Callable)

# The tensors beside query, key and value that act on scores, in the operators' order. All of these
# have gradients and tangents.
MASKS: tuple[str, ...] = ("attn_mask", "bias")  # broadcastable to [..., H, L, S]
BY_HEAD: tuple[str, ...] = ("alibi_slopes", "sinks")  # broadcastable to [..., H]
DIFFERENTIABLE: tuple[str, ...] = ("query", "key", "value", *MASKS, *BY_HEAD)


class _CommonOptions(TypedDict, total=False):
    """What every function takes."""

    softcap: Annotated[float, "if not 0, scores become `softcap * tanh(score / softcap)`."]
    alibi_slopes: Annotated[
        Tensor | None,
        "floating, broadcastable to `[..., H]` (of N packed documents, `[N, H]`): "
        "`slope * |i + S - L - j|` is taken off the scores.",
    ]
    bias: Annotated[
        Tensor | None,
        "float32 or query's dtype, broadcastable to `[..., H, L, S]`: added to the scores beside "
        "any attn_mask; -inf hides. Of packed documents `[N, H, L, S]`, by positions within a "
        "document, where L and S are at least the longest document's; of a cache S is at least its "
        "longest row's, counted from the first key that is seen.",
    ]


class SoftmaxOptions(_CommonOptions, total=False):
    """What every function with a softmax takes."""

    sinks: Annotated[
        Tensor | None,
        "floating, of the shapes of alibi_slopes: the score of one more key that every query of "
        "the head sees and whose value is 0. It counts in the lse, too.",
    ]


class HardOptions(_CommonOptions, total=False):
    """What `hard_attention` takes."""

    scale: Annotated[float | None, "multiplies the scores; `1 / sqrt(D)` if None."]
    enable_gqa: Annotated[
        bool, "key and value may have fewer heads than query, as long as they divide H."
    ]
    window_size: Annotated[
        tuple[int, int] | None,
        "`(left, right)`: query i sees keys from `i + S - L - left` to `i + S - L + right`: "
        "aligned bottom-right, as in FlashAttention; -1 leaves a side open. Time grows with L "
        "times the window, not with L * S.",
    ]


class ScoreOptions(HardOptions, SoftmaxOptions, total=False):
    """What `attention` and `attention_weights` take."""


class TangentOptions(ScoreOptions, total=False):
    """What `attention_jvp` takes."""

    query_tangent: Annotated[Tensor | None, "`[..., H, L, D]`: the direction of query."]
    key_tangent: Annotated[Tensor | None, "`[..., H, S, D]`, of key."]
    value_tangent: Annotated[Tensor | None, "`[..., H, S, Dv]`, of value."]
    attn_mask_tangent: Annotated[Tensor | None, "of a floating attn_mask, of its own shape."]
    alibi_slopes_tangent: Annotated[Tensor | None, "of alibi_slopes, of their own shape."]
    bias_tangent: Annotated[Tensor | None, "of bias, of its own shape."]
    sinks_tangent: Annotated[Tensor | None, "of sinks, of their own shape."]


def defaults(operator: OpOverload) -> dict[str, Any]:
    """The arguments of the operator that need not be given, in the order of its schema."""
    arguments = operator._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()}


def show_options(operator: OpOverload) -> Callable[[Function], Function]:
    """A decorator for a function that passes its `**options: Unpack[...]` on to the operator.

    `inspect.signature` and `help` show each option as if it were a parameter: in the signature
    they stand behind those that the schema has before them, in the docstring in the place of the
    line that begins with `**options`. The function itself is returned, so a call costs no more."""

    def show(function: Function) -> Function:
        (group,) = get_args(function.__annotations__["options"])  # of Unpack[group]
        hints = get_type_hints(group, include_extras=True)
        options = {n: (x, *get_args(hints[n])) for n, x in defaults(operator).items() if n in hints}
        schema = [argument.name for argument in operator._schema.arguments]
        before = schema[: schema.index(next(iter(options)))]
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[:-1]
        place = 1 + max(i for i, parameter in enumerate(parameters) if parameter.name in before)
        parameters[place:place] = (
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for n, (default, kind, _) in options.items()
        )
        function.__signature__ = signature.replace(parameters=parameters)
        texts = [f"{n}: {text}" for n, (_, _, text) in options.items()]
        if function.__doc__:  # which python -OO leaves out
            function.__doc__ = re.sub(
                r"^( *)\*\*options.*$", lambda m: _listed(texts, m[1]), function.__doc__, flags=re.M
            )
        return function

    return show


def _listed(texts: list[str], indent: str) -> str:
    """An entry of a docstring for each text, with what stands in backticks on one line."""
    wrap = textwrap.TextWrapper(100, indent, indent + "    ", break_on_hyphens=False)
    whole = (re.sub("`.*?`", lambda code: code[0].replace(" ", "\0"), text) for text in texts)
    return "\n".join(map(wrap.fill, whole)).replace("\0", " ")


def refuse_unknown(function: Callable, options: Mapping[str, Any]) -> None:
    """Raises what Python does for a keyword that the function does not have. Called when the
    operator has failed, since looking before each call takes time."""
    for name in options:
        if name not in inspect.signature(function).parameters:
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {name!r}"
            ) from None
