"""The keyword options that the functions share, for type checkers, and what the operators say of
theirs. What each option means stands in the docstring of `attention`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from typing_extensions import TypedDict, Unpack

from qkv.spans import Spans, tensor_of

__all__ = [
    "AttentionOptions",
    "FlexOptions",
    "HardOptions",
    "ScoreOptions",
    "SoftmaxOptions",
    "Unpack",
]

# The tensors beside query, key and value that act on scores, in the operators' order. All of these
# have gradients and tangents, but for spans.
PAIRS: tuple[str, ...] = ("attn_mask", "bias")  # broadcastable to [..., H, L, S]
MASKS: tuple[str, ...] = (*PAIRS, "spans")  # these, and what broadcasts to [..., H, L, 2 n]
BY_HEAD: tuple[str, ...] = ("alibi_slopes", "sinks")  # broadcastable to [..., H]
TABLES: tuple[str, ...] = ("score_tables", "score_indices")  # of a score program, [N] or [R, N]
DIFFERENTIABLE: tuple[str, ...] = ("query", "key", "value", *PAIRS, *BY_HEAD, TABLES[0])


class _CommonOptions(TypedDict, total=False):
    """What every function takes."""

    softcap: float
    alibi_slopes: Tensor | None
    bias: Tensor | None
    spans: Spans | Tensor | None


class SoftmaxOptions(_CommonOptions, total=False):
    """What every function with a softmax takes."""

    sinks: Tensor | None


class FlexOptions(SoftmaxOptions, total=False):
    """What `flex_attention` takes beside the arguments of torch's."""

    window_size: tuple[int, int] | None


class HardOptions(_CommonOptions, total=False):
    """What `hard_attention` takes."""

    scale: float | None
    enable_gqa: bool
    window_size: tuple[int, int] | None


class ScoreOptions(HardOptions, SoftmaxOptions, total=False):
    """What every dense function with a softmax takes."""


class AttentionOptions(ScoreOptions, total=False):
    """What `attention` takes."""

    indices: Tensor | None


def defaults(operator: OpOverload) -> dict[str, Any]:
    """The arguments of the operator that need not be given, in the order of its schema."""
    arguments = operator._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()}


def keywords_of(operator: OpOverload, after: str = "") -> Callable[..., dict[str, Any]]:
    """A function that takes the keyword arguments of the operator, or all that stand after one, by
    position in the order of its schema, and returns those that are not their defaults.

    An argument costs the dispatcher 0.2 us and a keyword 0.5, so that every function of the package
    passes only those that say something.
    A loop over the names would take as long as that, so the function is written here as one would
    by hand: an `if` for each name. Of `Spans` the operators take the tensor."""
    arguments = operator._schema.arguments
    if after:
        arguments = arguments[[a.name for a in arguments].index(after) + 1 :]
    else:
        arguments = [a for a in arguments if a.kwarg_only]
    own = operator._schema.name.removeprefix("qkv::")  # as errors of unknown keywords call it
    lines = [f"def {own}({', '.join(f'{a.name}={a.default_value!r}' for a in arguments)}):"]
    lines.append(" given = {}")
    for name, default in ((a.name, a.default_value) for a in arguments):
        differs = "!=" if isinstance(default, (float, str)) else "is not"
        value = "tensor_of(spans)" if name == "spans" else name
        lines.append(f" if {name} {differs} {default!r}: given[{name!r}] = {value}")
    namespace: dict[str, Any] = {"tensor_of": tensor_of}
    exec("\n".join([*lines, " return given"]), namespace)
    return namespace[own]


def score_keywords(score_mod: Callable[..., Any], query: Tensor) -> dict[str, Any]:
    """What the operators are told of a score function, whose part of the package takes time to
    import."""
    from qkv._score_function.arguments import keywords_of_program

    return keywords_of_program(score_mod, query)
