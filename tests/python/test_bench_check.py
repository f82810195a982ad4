"""The benchmark refuses to time wrong answers."""

import pytest
import torch
from bench_runs import SMALL, make_up_rates, option_case, sdpa

import qkv
from benchmarks import __main__ as benchmarks
from benchmarks import by_hand, run
from benchmarks.call import Call
from benchmarks.case import Case
from benchmarks.check import WrongAnswer, check, compare
from benchmarks.grid import parse
from benchmarks.options import OPTIONS
from qkv.testing._tolerance import ROUNDINGS

pytestmark = pytest.mark.usefixtures("no_isa_asked_for")


def scaled(query, key, value, **options):
    return sdpa(query, key, value, **options) * 1.001


def with_nan(query, key, value, **options):
    output = sdpa(query, key, value, **options)
    return torch.where(torch.arange(output.size(-1)) == 1, torch.nan, output)


def without_one_gradient(query, key, value, **options):
    """Attention whose results are right, but the gradient of the first key is lost."""
    seen = torch.cat([key[..., :1, :].detach(), key[..., 1:, :]], -2)
    return sdpa(query, seen, value, **options)


def wrong_shape(query, key, value, **options):
    return sdpa(query, key, value, **options)[..., :1, :]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "wrong, tensor",
    [(scaled, "output"), (with_nan, "output"), (without_one_gradient, "grad_key")],
)
def test_wrong_answers_are_not_timed(monkeypatch, capsys, wrong, tensor, tmp_path):
    monkeypatch.setattr(qkv, "attention", wrong)
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("timed a wrong answer"))
    make_up_rates(monkeypatch)
    path = tmp_path / "run.json"
    arguments = ["--suite", "grid", "--shapes", "2x4/2x9x17x8c", "--json", str(path)]
    assert benchmarks.main(arguments) == 1
    message = capsys.readouterr().err
    assert "refused to time a wrong answer: 2x4/2x9x17x8c" in message
    assert f": {tensor} is off by " in message and "torch is off by" in message
    assert not path.exists()


def test_a_way_without_a_gradient_is_passed_over():
    case = Case(parse("1x1x2x2x2"), torch.float32)
    ours, truth = torch.ones(2), torch.ones(2).double()
    torchs = {"forward alone": {"output": truth}, "both": {"grad_key": truth + 1e-3}}
    found = compare(case, "grad_key", ours, torchs, truth)
    assert found["error"] == 0 and found["torch_error"] == pytest.approx(1e-3)


@pytest.mark.parametrize("dtype, factor", [(torch.bfloat16, 1.03), (torch.float16, 1.004)])
def test_half_precision_is_no_excuse(monkeypatch, dtype, factor):
    case = Case(parse("2x4/2x33x40x8c"), dtype)
    check(case)
    monkeypatch.setattr(qkv, "attention", lambda **x: sdpa(**x) * factor)
    with pytest.raises(WrongAnswer, match=": output is off by "):
        check(Case(case.entry, dtype))


def test_wrong_shape_is_named(monkeypatch):
    monkeypatch.setattr(qkv, "attention", wrong_shape)
    case = Case(parse("1x2x8x8x4"), torch.float32)
    with pytest.raises(WrongAnswer, match=r"output is torch.float32 \[1, 2, 1, 4\], expected"):
        check(case)


def with_wrong(name, change):
    """qkv.attention with one argument changed."""
    attention = qkv.attention

    def wrong(**inputs):
        return attention(**inputs | {name: change(inputs[name])})

    return wrong


def with_gradient_off(x):
    """x itself, but its gradient is a hundredth larger."""
    return x + 0.01 * (x - x.detach())


@pytest.mark.parametrize(
    "option, name, change, tensor",
    [
        ("dropout", "dropout_p", lambda p: p + 0.02, "output"),
        ("bias", "bias", lambda x: 1.001 * x, "output"),
        ("bias", "bias", with_gradient_off, "grad_bias"),
        ("bias-padded", "bias", with_gradient_off, "grad_bias"),
        ("bias-padded", "attn_mask", lambda x: None, "output"),
        ("mask", "attn_mask", lambda x: x.logical_not(), "output"),
        ("softcap", "softcap", lambda x: 1.1 * x, "output"),
        ("alibi", "alibi_slopes", lambda x: 1.001 * x, "output"),
        ("slopes", "alibi_slopes", with_gradient_off, "grad_alibi_slopes"),
        ("sinks", "sinks", lambda x: x + 0.001, "output"),
        ("sinks", "sinks", with_gradient_off, "grad_sinks"),
        ("window", "window_size", lambda x: (x[0] - 1, x[1]), "output"),
    ],
)
def test_wrong_options_are_not_timed(monkeypatch, option, name, change, tensor):
    case = option_case(monkeypatch, option)
    monkeypatch.setattr(qkv, "attention", with_wrong(name, change))
    case.base = None
    with pytest.raises(WrongAnswer, match=f": {tensor} is off by "):
        check(case)


def test_wrong_packing_is_not_timed(monkeypatch):
    case = option_case(monkeypatch, "varlen", "5x4/2x21x21x8")
    varlen_attn = qkv.varlen_attn
    case.base = None

    def one_document(*, cu_seq_q, **inputs):
        return varlen_attn(**inputs, cu_seq_q=cu_seq_q[[0, -1]])

    monkeypatch.setattr(qkv, "varlen_attn", one_document)
    with pytest.raises(WrongAnswer, match=": output is off by "):
        check(case)


def test_wrong_base_is_not_timed(monkeypatch):
    case = option_case(monkeypatch, "softcap")
    monkeypatch.setattr(qkv, "attention", with_wrong("is_causal", lambda x: True))
    with pytest.raises(WrongAnswer, match=r"plain \(2x4/2x21x21x8\): output is off by "):
        check(case)


def test_torchs_way_to_other_numbers_is_refused(monkeypatch):
    def scaled(**inputs):
        return by_hand.composed(**inputs) * 1.01

    case = option_case(monkeypatch, "softcap")
    case.ways["scaled"] = Call(scaled, case.inputs, case.grad_output)
    with pytest.raises(WrongAnswer, match=r"torch's output \(scaled\) is off by .* from float64"):
        check(case)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("causal", ["", "c"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_passes_its_check(monkeypatch, option, causal, dtype):
    """Every option passes, so every one of torch's ways computes the same as ours."""
    if OPTIONS[option].is_cold and causal:
        pytest.skip("every query sees all keys")
    if dtype in OPTIONS[option].refuses:
        pytest.skip("the command refuses it")
    monkeypatch.setattr("benchmarks.truth.BLOCK_ELEMENTS", 500)
    case = option_case(monkeypatch, option, SMALL + causal, dtype)
    found = check(case)
    assert set(found) == {"output"} | {f"grad_{name}" for name in case.leaves}
    assert all(e["error"] <= e["limit"] for e in found.values())
