"""The keywords of the functions are those of the operators: names, order, types and defaults."""

import inspect
import sys
import typing
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.attention.varlen
import typing_extensions

import qkv
from qkv.distributed import ring_attention
from qkv.options import defaults, keywords_of

Q = torch.ones(2, 4, 3, 8)
PACKED = torch.ones(6, 4, 8)
WEIGHT, CACHE = torch.ones(4, 8, 8), torch.ones(2, 1, 3, 16)  # of latent attention
ENDS = torch.tensor([0, 2, 6])
# The operator of each function, a good call, and what the function has beside the operator.
FUNCTIONS = {
    qkv.attention: ("attention", (Q, Q, Q), {"return_lse", "indices"}),
    qkv.attention_jvp: ("attention_jvp", (Q, Q, Q), set()),
    qkv.attention_weights: ("attention_weights", (Q, Q), set()),
    qkv.attention_with_weights: ("attention_with_weights", (Q, Q, Q), set()),
    qkv.hard_attention: ("hard_attention", (Q, Q, Q), {"return_index"}),
    qkv.varlen_attn: (
        "varlen_attention", (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 4),
        {"return_aux", "num_splits", "score_mod"},
    ),
    qkv.attention_with_kvcache: (
        "attention_with_kvcache", (Q, Q, Q), {"num_splits", "return_softmax_lse", "score_mod"},
    ),
    qkv.latent_attention: (
        "latent_attention", (Q, Q, Q[:, :1], Q[:, :1], WEIGHT, WEIGHT),
        {"return_lse", "score_mod"},
    ),
    qkv.latent_attention_with_kvcache: (
        "latent_attention_with_kvcache", (Q, Q, CACHE, WEIGHT, WEIGHT),
        {"return_softmax_lse", "score_mod"},
    ),
    ring_attention: (
        "attention", (Q, Q, Q),
        {"return_lse", "seqlen", "cu_seqlens", "dropout_seed", "method", "group", "score_mod"},
    ),
}  # fmt: skip
# As annotations, what schemas call these types.
ANNOTATIONS = {
    "Tensor": torch.Tensor,
    "bool": bool,
    "float": float,
    "int": int,
    "Optional[bool]": bool | None,
    "Optional[float]": float | None,
    "Optional[List[int]]": tuple[int, int] | None,
    "Optional[Tensor]": torch.Tensor | None,
}
REDUCE = Literal["heads", "queries"] | None
SPANS = qkv.Spans | torch.Tensor | None
# Where torch's or FlashAttention's signature, or what only Python can say, is another one.
EXCEPTIONS = {
    (qkv.varlen_attn, "window_size"): (tuple[int, int], (-1, -1)),
    (qkv.attention_with_kvcache, "window_size"): (tuple[int, int] | None, (-1, -1)),
    (qkv.attention_with_kvcache, "rotary_interleaved"): (bool, True),
    (qkv.attention_with_kvcache, "cache_seqlens"): (torch.Tensor | int | None, None),
    (qkv.latent_attention_with_kvcache, "cache_seqlens"): (torch.Tensor | int | None, None),
    (qkv.attention_weights, "reduce"): (REDUCE, None),
    (qkv.attention_with_weights, "reduce"): (REDUCE, None),
}
PAGE = (Path(__file__).parents[2] / "docs/compare.md").read_text()
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def operator_of(function):
    return getattr(torch.ops.qkv, FUNCTIONS[function][0]).default


# What score_mod is to the operators.
PROGRAM = {"score_program", "score_tables", "score_indices", "score_tables_tangent"}


def arguments_of(function):
    return [a for a in operator_of(function)._schema.arguments if a.name not in PROGRAM]


def shared(function):
    """The parameters of the function that the operator has, too."""
    own = FUNCTIONS[function][2]
    return {n: p for n, p in inspect.signature(function).parameters.items() if n not in own}


@every_function
def test_names_are_the_schemas(function):
    assert FUNCTIONS[function][2] <= {*inspect.signature(function).parameters}
    names = [argument.name for argument in arguments_of(function)]
    found = list(shared(function))
    if function is qkv.varlen_attn:  # has torch's order, and the operator's behind it
        torchs = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
        names = [n for n in torchs if n in names] + [n for n in names if n not in torchs]
        assert [*inspect.signature(function).parameters][: len(torchs)] == [*torchs]
    assert found == names


@every_function
def test_kinds_types_and_defaults_are_the_schemas(function):
    parameters = shared(function)
    for argument in arguments_of(function):
        parameter = parameters[argument.name]
        keyword = parameter.kind == inspect.Parameter.KEYWORD_ONLY
        assert keyword == argument.kwarg_only
        default = argument.default_value if argument.has_default_value() else parameter.empty
        annotation = ANNOTATIONS.get(str(argument.type))
        annotation = SPANS if argument.name == "spans" else annotation
        expected = EXCEPTIONS.get((function, argument.name), (annotation, default))
        assert (parameter.annotation, parameter.default) == expected, argument.name


# Names of one thing, ours first; docs/compare.md says whose the others are.
CACHES = [qkv.attention_with_kvcache, qkv.latent_attention_with_kvcache]
SPELLINGS = [
    ("scale", {"softmax_scale": CACHES}),
    ("is_causal", {"causal": CACHES}),
    ("return_lse", {"return_softmax_lse": CACHES, "return_aux": [qkv.varlen_attn]}),
]


@pytest.mark.parametrize("ours, others", SPELLINGS, ids=[ours for ours, _ in SPELLINGS])
def test_other_spellings_stay_where_the_signature_is_not_ours(ours, others):
    functions = {getattr(qkv, name) for name in qkv.__all__} | {ring_attention}
    functions -= {qkv.flex_attention}  # which has torch's signature, and torch both
    functions = [f for f in functions if inspect.isfunction(f)]
    for other, theirs in others.items():
        having = [f for f in functions if other in inspect.signature(f).parameters]
        assert sorted(having, key=str) == sorted(theirs, key=str)
        assert all(ours not in inspect.signature(f).parameters for f in theirs)
        assert f"`{other}=" in PAGE or f"`{other}`" in PAGE


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing forgets overloads")
@every_function
def test_overloads_have_the_keywords_of_the_function(function):
    for overload in typing.get_overloads(function):
        parameters = dict(inspect.signature(overload).parameters)
        (options,) = typing.get_args(parameters.pop("options").annotation)  # of Unpack
        hints = typing_extensions.get_type_hints(options)
        parameters |= {n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in hints}
        assert parameters.keys() == inspect.signature(function).parameters.keys()
        for name, hint in hints.items():
            assert hint == inspect.signature(function).parameters[name].annotation


def test_both_attention_operators_take_the_same():
    ops = torch.ops.qkv
    assert defaults(ops.attention.default) == defaults(ops.attention_with_lse.default)
    weights = (ops.attention_weights.default, ops.attention_with_weights.default)
    assert defaults(weights[0]) == defaults(weights[1])


@every_function
def test_each_argument_arrives_under_its_name(function, monkeypatch):
    """`keywords_of` takes them by position, which nothing else looks at."""
    given = {name: object() for name in shared(function)} | {"spans": torch.zeros(())}
    seen = {}

    def operator(*args, **kwargs):
        seen.update(zip((a.name for a in arguments_of(function)), args, strict=False), **kwargs)
        raise Arrived

    module = sys.modules[function.__module__]
    if function is ring_attention:  # which makes a Call of them first
        monkeypatch.setattr(module, "team_of", lambda *_: None)
        monkeypatch.setattr(module, "Call", lambda x, *_, **more: operator(*x.values(), **more))
    else:
        monkeypatch.setattr(module, f"_{FUNCTIONS[function][0]}", operator)
    with pytest.raises(Arrived):
        function(**given)
    assert seen == given


class Arrived(Exception):
    """In the place of a result."""


@every_function
def test_only_what_says_something_reaches_the_operator(function):
    keywords = keywords_of(operator_of(function))
    arguments = [a for a in arguments_of(function) if a.kwarg_only]
    nothing = [a.default_value for a in arguments]
    assert keywords(*nothing) == {}
    for i, argument in enumerate(arguments):
        something = torch.zeros(()) if argument.name == "spans" else "something"
        said = [*nothing[:i], something, *nothing[i + 1 :]]
        assert keywords(*said) == {argument.name: something}


@every_function
def test_each_argument_is_described(function):
    """Once, under Args, alone or with others that mean the same in their own place."""
    lines = inspect.getdoc(function).split("\nArgs:\n")[1].split("\n\n")[0].splitlines()
    entries = [line.split(":")[0].strip() for line in lines if line[4] != " "]
    described = [name for entry in entries for name in entry.split(", ")]
    assert sorted(described) == sorted(inspect.signature(function).parameters)
    assert all(len(line) <= 100 and line.count("`") % 2 == 0 for line in lines)


@every_function
def test_unknown_keyword(function):
    message = rf"^{function.__name__}\(\) got an unexpected keyword argument 'windowsize'"
    with pytest.raises(TypeError, match=message):
        function(*FUNCTIONS[function][1], softcap=2.0, windowsize=3)


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f is not ring_attention])
def test_the_operators_own_errors_stay(function):
    _, good, _ = FUNCTIONS[function]
    function(*good, softcap=2.0)
    with pytest.raises(RuntimeError, match="softcap"):
        function(*good, softcap="much")
