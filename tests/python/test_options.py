"""The keyword options of the functions are those of the operators, and are shown in full."""

import inspect

import pytest
import torch

import qkv
from qkv.options import defaults

Q = torch.ones(2, 4, 3, 8)
PACKED = torch.ones(6, 4, 8)
ENDS = torch.tensor([0, 2, 6])
# The operator of each function, a good call, and what the function has beside the operator.
FUNCTIONS = {
    qkv.attention: ("attention", (Q, Q, Q), {"return_lse"}),
    qkv.attention_weights: ("attention_weights", (Q, Q), set()),
    qkv.attention_with_weights: ("attention_with_weights", (Q, Q, Q), set()),
    qkv.hard_attention: ("hard_attention", (Q, Q, Q), {"return_index"}),
    qkv.varlen_attn: (
        "varlen_attention", (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 4),
        {"return_aux", "num_splits"},
    ),
    qkv.attention_with_kvcache: (
        "attention_with_kvcache", (Q, Q, Q), {"num_splits", "return_softmax_lse"},
    ),
}  # fmt: skip
# As annotations, what schemas call these types.
ANNOTATIONS = {
    "bool": bool,
    "float": float,
    "Optional[float]": float | None,
    "Optional[List[int]]": tuple[int, int] | None,
    "Optional[Tensor]": torch.Tensor | None,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def operator_of(function):
    return getattr(torch.ops.qkv, FUNCTIONS[function][0]).default


def shared_options(function):
    """What the function takes as `**options`, not as an argument of its own."""
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [p for n, p in inspect.signature(function).parameters.items() if n not in named]


@every_function
def test_keywords_are_the_schemas(function):
    names = {argument.name for argument in operator_of(function)._schema.arguments}
    assert set(inspect.signature(function).parameters) == names | FUNCTIONS[function][2]


@every_function
def test_types_and_defaults_are_the_schemas(function):
    schema = {argument.name: argument for argument in operator_of(function)._schema.arguments}
    options = shared_options(function)
    assert {"softcap", "alibi_slopes"} <= {option.name for option in options}
    for option in options:
        assert option.kind == inspect.Parameter.KEYWORD_ONLY
        assert option.default == schema[option.name].default_value
        assert option.annotation == ANNOTATIONS[str(schema[option.name].type)]


def test_both_attention_operators_take_the_same():
    ops = torch.ops.qkv
    assert defaults(ops.attention.default) == defaults(ops.attention_with_lse.default)


@every_function
def test_each_option_is_described(function):
    lines = inspect.getdoc(function).splitlines()
    for option in shared_options(function):
        assert sum(line.startswith(f"    {option.name}: ") for line in lines) == 1
    assert not any(line.strip().startswith("**options") for line in lines)
    assert all(len(line) <= 100 and line.count("`") % 2 == 0 for line in lines)


@every_function
def test_unknown_keyword(function):
    _, good, _ = FUNCTIONS[function]
    function(*good, softcap=2.0)
    message = rf"^{function.__name__}\(\) got an unexpected keyword argument 'windowsize'$"
    with pytest.raises(TypeError, match=message):
        function(*good, softcap=2.0, windowsize=3)
    with pytest.raises(RuntimeError, match=r"sinks|softcap"):  # the operator's own errors stay
        function(*good, softcap="much")


def test_unknown_keyword_of_jagged_tensors():
    x = torch.nested.nested_tensor_from_jagged(PACKED, ENDS).transpose(1, 2)
    with pytest.raises(TypeError, match="^attention.* 'windowsize'$"):
        qkv.attention(x, x, x, windowsize=3)
