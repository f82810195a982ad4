"""The ways of the benchmarks that torch.compile makes."""

import pytest
import torch
from bench_runs import SMALL

from benchmarks import compiled, options
from benchmarks.case import Case, fastest_way
from benchmarks.check import WrongAnswer, check

REFUSED = "FlexAttention does not support backward on CPU"


def alone(name, monkeypatch, option, shape=SMALL):
    """A case of the option beside one of torch's ways, and no base."""
    monkeypatch.setattr(options, "WINDOW", (3, 0))
    how = options.OPTIONS[option]
    for other in set(how.ways) - {name}:
        monkeypatch.delitem(how.ways, other)
    case = Case(options.parse(f"{option}:{shape}"), torch.float32)
    case.base = None
    return case


# The fewest that have everything: grouped heads, a mask of positions, and a parameter that learns.
@pytest.mark.long
@pytest.mark.parametrize("option", ["sinks", pytest.param("bias", marks=pytest.mark.long)])
def test_the_compiled_textbook_is_right_and_timed(monkeypatch, option):
    case = alone("by hand, compiled", monkeypatch, option, SMALL + "c")
    found = check(case)
    assert f"grad_{'sinks' if option == 'sinks' else 'bias'}" in found
    for direction in ("forward", "backward", "both"):
        ways, skipped = case.ways_in(direction)
        assert fastest_way(ways, direction)[0] == "by hand, compiled" and not skipped
        for _ in range(2):  # a graph that is kept is not used up by one backward pass
            ways["by hand, compiled"].timed(direction)()


@pytest.mark.long
@pytest.mark.parametrize(
    "option, shape",
    [
        ("window", SMALL + "c"),
        *(pytest.param(option, shape, marks=pytest.mark.long)
          for option in ("plain", "softcap", "alibi", "window") for shape in (SMALL, SMALL + "c")),
        pytest.param("alibi", "1x2x21x33x8", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_flex_attention_is_right_and_has_no_backward_pass(monkeypatch, option, shape):
    case = alone("FlexAttention", monkeypatch, option, shape)
    assert {"output", "grad_query"} <= set(check(case))
    assert list(case.ways_in("forward")[0]) == ["FlexAttention"]
    for direction in ("backward", "both"):
        ways, skipped = case.ways_in(direction)
        assert not ways and skipped["FlexAttention"].startswith(REFUSED)


def test_a_wrong_score_is_refused(monkeypatch):
    """With the trial run and the compiler left out: the eager FlexAttention stands in."""
    monkeypatch.setattr(compiled, "compile_afresh", lambda function: function)
    monkeypatch.setattr(compiled, "score_of", lambda inputs: lambda score, b, h, i, j: score * 1.1)
    case = alone("FlexAttention", monkeypatch, "softcap")
    with pytest.raises(WrongAnswer, match=r"torch's output \(FlexAttention\) is off by"):
        check(case)


def test_without_a_compiler_the_reason_is_kept(monkeypatch):
    def compile(function, **options):
        def fails(*inputs):
            raise RuntimeError("No working C++ compiler found\nin 3 places")

        return fails

    compiled.compiler_fails.cache_clear()
    try:
        monkeypatch.setattr(torch, "compile", compile)
        case = Case(options.parse(f"softcap:{SMALL}"), torch.float32)
        assert list(case.ways) == ["by hand"]
        reason = "RuntimeError: No working C++ compiler found"
        names = ["by hand, compiled", "FlexAttention"]
        assert case.ways_in("both") == (case.ways, dict.fromkeys(names, reason))
    finally:
        compiled.compiler_fails.cache_clear()


def test_flex_attention_takes_no_float64(monkeypatch):
    """Eager, it does: here it raises as the compiled one would."""

    def raises(*inputs, **options):
        raise NotImplementedError("only three dtypes")

    monkeypatch.setattr(compiled, "compile_afresh", lambda function: raises)
    case = Case(options.parse(f"softcap:{SMALL}"), torch.float64)
    assert case.unavailable["FlexAttention"] == "NotImplementedError: only three dtypes"
