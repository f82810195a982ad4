"""Holds a model that qkv.convert changed against the same model as it was."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

import qkv

from . import generation
from .special import OTHER_WEIGHTS

Results = dict[str, Tensor]
# Errors of up to this share of a tensor's largest number are rounding, and beyond it those of up to
# so many times what a change of the weights in their last bit makes.
ROUNDING, TIMES = 2e-5, 50
# In bfloat16 the error, which is measured against float32, may be so many times eager's own, and
# is not looked at where it is below this share of a result's norm.
HALF_TIMES, HALF_ROUNDING = 2.0, 1e-2


NO_SOFTMAX = "it has no attention that softmax makes"
AS_SDPA = 'as with "sdpa", which differs from "eager"'


class Differs(Exception):
    """What qkv computes is not what the model computed before."""


def judge(model: nn.Module, call: dict[str, Any]) -> dict[str, Any]:
    """outcome: "right", "stays", "refused" or "wrong"; why; checks: what was compared, and where
    that is not possible with the model as it was, why."""
    try:
        conversion = qkv.convert(model)
    except Exception as error:
        why = f"{type(error).__name__}: {_words(error)}"
        return {"outcome": "wrong", "why": why}
    checks: dict[str, str] = {}
    try:
        try:
            has_any = bool(conversion.changed)
            ran = has_any and _operators(model, call)
            # What was to be changed may turn out, in that call, to be something else.
            changed, left = conversion.changed, conversion.left
        finally:
            conversion.undo()
        kept = "; ".join(sorted(set(left.values())))
        if not ran or not changed:
            why = "no operator of qkv runs in a call" if has_any else NO_SOFTMAX
            return {"outcome": "stays", "why": kept or why}
        parts = dict.fromkeys(x.partition("; ")[2] for x in changed.values() if "; " in x)
        for name, check in CHECKS.items():
            said = check(model, call)
            if said is not None:
                checks[name] = said
    except NotImplementedError as error:
        return {"outcome": "refused", "why": _words(error), "checks": checks}
    except Differs as error:
        return {"outcome": "wrong", "why": _words(error), "checks": checks}
    except Exception as error:
        why = f"{type(error).__name__}: {_words(error)}"
        return {"outcome": "wrong", "why": why, "checks": checks}
    return {"outcome": "right", "why": "; ".join(parts) or kept, "checks": checks}


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _operators(model: nn.Module, call: dict[str, Any]) -> set[str]:
    with torch.no_grad(), profile() as found:
        model(**call)
    return {event.key for event in found.key_averages() if event.key.startswith("qkv::")}


def both(
    model: nn.Module, run: Callable[[nn.Module], Results], what: str, own: str = "as it was"
) -> str:
    """Compares what run returns; "ok", or why the model fails as it was."""
    try:
        expected = run(model)
    except Exception as error:
        return f"{own}: {type(error).__name__}: {_words(error)[:120]}"
    if not expected:
        return "nothing to compare"
    conversion = qkv.convert(model)
    try:
        found = run(model)
    finally:
        conversion.undo()
    try:
        compare(model, run, what, expected, found)
    except Differs:
        if not _as_sdpa(model, run, what, found):
            raise
        model.set_attn_implementation("sdpa")  # from here on it is held against that
        return AS_SDPA
    return "ok"


def _as_sdpa(model: Any, run: Callable, what: str, found: Results) -> bool:
    """Whether it is what transformers' "sdpa" gives: some models mean something else by it."""
    if not hasattr(model, "set_attn_implementation"):
        return False
    try:
        other = copy.deepcopy(model)
        other.set_attn_implementation("sdpa")
        compare(other, run, what, run(other), found)
        return True
    except Exception:
        return False


def compare(model: nn.Module, run: Callable, what: str, expected: Results, found: Results) -> None:
    if missing := expected.keys() ^ found.keys():
        raise Differs(f"{what}: {', '.join(sorted(missing)[:3])} not in both")
    largest = max(float(x.abs().max()) for x in expected.values())
    noise: Results | None = None
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise Differs(f"{what}: {name} has another shape")
        seen = tensor.isfinite()
        if not torch.equal(seen, found[name].isfinite()):
            raise Differs(f"{what}: {name} is not finite in other places")
        error = float((found[name] - tensor)[seen].abs().max()) if seen.any() else 0.0
        size = float(tensor[seen].abs().max()) if seen.any() else 0.0
        if error <= ROUNDING * size + 1e-7 * largest:
            continue
        if noise is None:
            noise = _noise(model, run, expected)
        if error > ROUNDING * size + TIMES * noise[name].item():
            raise Differs(f"{what}: {name} is off by {error / max(size, 1e-30):.1e} of its size")


def _noise(model: nn.Module, run: Callable, expected: Results) -> Results:
    """By how much each result changes with the last bit of the weights."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                parameter *= 1 + 1e-7 * torch.randn_like(parameter).sign()
    again = run(moved)
    return {
        name: (again[name] - x).nan_to_num().abs().max() if again[name].shape == x.shape
        else torch.tensor(0.0) for name, x in expected.items()
    }  # fmt: skip


def tensors(thing: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in what a model returns, but for caches."""
    if isinstance(thing, Tensor):
        if thing.is_floating_point() and thing.numel() and not thing.is_sparse:
            yield name, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors(value, f"{name}.{key}".strip("."))
    elif isinstance(thing, (list, tuple)):
        for i, value in enumerate(thing):
            yield from tensors(value, f"{name}[{i}]")
    elif hasattr(thing, "sample"):
        yield from tensors(thing.sample, name)


def results(model: nn.Module, call: dict[str, Any], with_grads: bool = True) -> Results:
    """Outputs, and gradients of all parameters that have one, of a sum of all outputs with factors
    that are always the same. Weights are not among them: some models return those of "eager" also
    where nobody asks."""
    torch.manual_seed(0)
    found = {name: x for name, x in tensors(model(**call)) if "attentions" not in name}
    if not with_grads:
        return {name: x.detach() for name, x in found.items()}
    generator = torch.Generator().manual_seed(1)
    losses = []
    for x in found.values():
        factor = torch.randn(x.shape, generator=generator).to(x.dtype)
        if x.requires_grad and x.isfinite().all():
            losses.append((x * factor).sum() / x.numel() ** 0.5)
    if losses:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
        grads = torch.autograd.grad(losses, list(named.values()), allow_unused=True)
        pairs = zip(named, grads, strict=True)
        found |= {f"gradient of {n}": g for n, g in pairs if g is not None}
    return {name: x.detach() for name, x in found.items()}


def outputs_and_gradients(model: nn.Module, call: dict[str, Any]) -> str:
    return both(model, lambda m: results(m, call), "float32")


def output_attentions(model: nn.Module, call: dict[str, Any]) -> str | None:
    if not hasattr(model, "set_attn_implementation"):
        return None
    if model.config.model_type in OTHER_WEIGHTS:
        return OTHER_WEIGHTS[model.config.model_type]

    def run(model: nn.Module) -> Results:
        with torch.no_grad():
            found = tensors(model(**call, output_attentions=True))
        return {name: x for name, x in found if "attentions" in name}

    return both(model, run, "output_attentions")


def checkpointing(model: Any, call: dict[str, Any]) -> str | None:
    """Gradients of a model in training, whose dropout is off."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None

    def run(model: Any) -> Results:
        torch.manual_seed(0)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for part in model.modules():
            if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout)):
                part.eval()
        try:
            return results(model, call)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()

    return both(model, run, "gradient checkpointing")


def bfloat16(model: nn.Module, call: dict[str, Any]) -> str:
    """The errors of outputs and gradients against float32, with the same weights. A result that is
    worse is so with five sets of weights: with three of them a model may choose other experts."""
    try:
        half = copy.deepcopy(model).bfloat16()
        whole = copy.deepcopy(half).float()
    except RuntimeError as error:
        return f"as it was: it cannot be copied: {_words(error)[:80]}"
    rounded, wide = (_cast(_cast(call, torch.bfloat16), x) for x in (torch.bfloat16, torch.float32))
    worse: dict[str, str] | None = None
    for seed in range(5):
        try:
            truth, own = results(whole, wide), results(half, rounded)
        except Exception as error:
            return f"as it was: {type(error).__name__}: {_words(error)[:120]}"
        conversion = qkv.convert(half)
        try:
            found = results(half, rounded)
        finally:
            conversion.undo()
        now = _worse(truth, own, found)
        worse = now if worse is None else {name: now[name] for name in worse if name in now}
        if not worse:
            return "ok"
        torch.manual_seed(seed)
        with torch.no_grad():
            for a, b in zip(half.parameters(), whole.parameters(), strict=True):
                a *= 1 + 0.05 * torch.randn_like(a)
                b.copy_(a)
    name, how = next(iter((worse or {}).items()))
    raise Differs(f"bfloat16: {name} is {how}")


def _cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }


def _worse(truth: Results, own: Results, found: Results) -> dict[str, str]:
    """The results whose error is larger than eager's, and by how much."""
    gradients = [name for name in truth if name.startswith("gradient of")]
    floor = 1e-3 * sum(float(truth[name].norm()) ** 2 for name in gradients) ** 0.5
    worse = {}
    for name, expected in truth.items():
        error, usual = (float((x[name].float() - expected).norm()) for x in (found, own))
        size = float(expected.norm())
        most = HALF_TIMES * usual + HALF_ROUNDING * size + (floor if name in gradients else 0)
        if not error <= most:
            shares = (f"{x / max(size, 1e-30):.1e}" for x in (error, usual))
            worse[name] = "off by {} of its norm, eager by {}".format(*shares)
    return worse


def _generates(cache: str, beams: int, padded: bool) -> Callable:
    what = f"generation, {cache} cache" + (", beams" if beams > 1 else "")

    def check(model: Any, call: dict[str, Any]) -> str | None:
        if not generation.is_possible(model, call):
            return None
        given = generation.left_padded(model, call) if padded else generation.unpadded(call)
        return both(model, lambda m: generation.logits(m, given, cache, beams), what)

    return check


CHECKS: dict[str, Callable[[Any, dict[str, Any]], str | None]] = {
    "float32": outputs_and_gradients,
    "output_attentions": output_attentions,
    "checkpointing": checkpointing,
    "bfloat16": bfloat16,
    "greedy, dynamic cache": _generates("dynamic", 1, padded=True),
    "greedy, static cache": _generates("static", 1, padded=True),
    "beams": _generates("dynamic", 2, padded=False),
}
