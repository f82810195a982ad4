"""One operator, one instruction set, one round of calls: what a worker process does."""

import faulthandler
import inspect
import re
import sys
import warnings

import breaking
import held
import hypothesis
import torch
from operators import MANUAL_SEED, OPERATORS

import qkv

SECONDS_A_CALL = 120  # a longer one hangs; sanitizers make calls a hundred times longer

# Errors that name no argument, all of them by torch: there is not enough memory for the call.
NAMELESS = re.compile("can't allocate memory|not enough memory|Storage size calculation overflowed")


def describe(x):
    if not isinstance(x, torch.Tensor):
        return repr(x)
    try:
        if x.layout != torch.strided or x.is_nested:
            return f"{x.dtype} {x.layout} tensor"
        text = f"{x.dtype} {[*x.shape]} strides {[*x.stride()]} offset {x.storage_offset()}"
        if x.dtype in (torch.int32, torch.int64) and x.numel() <= 20 and not x.is_meta:
            text += f" = {x.tolist()}"
        return text + f" {x.device}" + (" requires grad" if x.requires_grad else "")
    except RuntimeError as error:
        return f"a tensor that cannot be described: {error}"


def describe_call(name, call, changed):
    lines = [f"{name}, changed: {', '.join(changed) or 'nothing'}"]
    return "\n".join([*lines, *(f"    {n} = {describe(x)}" for n, x in call.items())])


def names_of(operator):
    """The names of the operator's arguments, one of which has to be in an error's text."""
    function = operator.function
    if isinstance(function, torch._ops.OpOverloadPacket):
        return {a.name for a in function.default._schema.arguments}
    qkvs = {"kvcache": qkv.attention_with_kvcache, "python_attention": qkv.attention}
    return set(inspect.signature(qkvs[function.__name__]).parameters)


def names_an_argument(text, names):
    text = re.sub(r"(missing|a) value", "", text)  # torch's words, which mean no argument
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


class Hunt:
    """Calls one operator, judges every call, and counts."""

    def __init__(self, name, record):
        self.name, self.operator, self.record = name, OPERATORS[name], record
        self.names = names_of(self.operator)
        self.counts = dict.fromkeys(("held", "refused", "not judged"), 0)

    def one_call(self, call, changed):
        """Raises AssertionError if the call did anything but what it may."""
        text = describe_call(self.name, call, changed)
        self.record(text)
        before = dict(call)
        for name in self.operator.in_place:
            if can_be_copied(call[name]):
                before[name] = call[name].detach().clone()
        torch.manual_seed(MANUAL_SEED)
        try:
            results = self.operator.function(**call)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return self.judge_error(error, call, before, changed)
        results = held.as_tuple(results)
        results += tuple(call[name] for name in self.operator.in_place)
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in call.values()):
            assert all(x is None or x.is_meta for x in results), "meta in, something else out"
            self.counts["not judged"] += 1
            return
        hold_meta(self.operator.function, before, results)
        try:
            self.operator.hold(before, results)
            self.counts["held"] += 1
        except held.NotJudged:
            self.counts["not judged"] += 1

    def judge_error(self, error, call, before, changed):
        text = str(error)
        assert changed, f"a good call was refused: {text}"
        known = names_an_argument(text, self.names) or NAMELESS.search(text)
        if any(is_jagged(x) for x in call.values()):
            known = known or isinstance(error, NotImplementedError)  # torch raises a subclass
        assert known, f"{type(error).__name__} that names no argument: {text}"
        for name in self.operator.in_place:
            if can_be_copied(x := call[name]):
                assert torch.equal(*map(bits, (x, before[name]))), f"{name} was written to"
        self.counts["refused"] += 1

    def round(self, seed, calls):
        """Makes so many calls, drawn from `seed`; the first that fails is made as simple as
        possible."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=calls, database=None, deadline=None, print_blob=False,
            report_multiple_bugs=False,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(drawn=breaking.broken(self.operator.arguments))
        def every_call(drawn):
            faulthandler.dump_traceback_later(SECONDS_A_CALL, exit=True, file=sys.__stderr__)
            hypothesis.note(describe_call(self.name, *drawn))
            try:
                self.one_call(*drawn)
            finally:
                faulthandler.cancel_dump_traceback_later()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            every_call()


def hold_meta(function, call, results):
    """Holds that the Meta kernel, which torch.compile asks, says what the CPU kernel has just
    returned."""

    def as_meta(x):
        x = getattr(x, "tensor", x)  # of a Spans or a BlockMask
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    said = held.as_tuple(function(**{n: as_meta(x) for n, x in call.items()}))
    for n, (x, y) in enumerate(zip(said, results, strict=False)):
        assert (x is None) == (y is None), f"Meta and CPU disagree on result {n}: {x}, {y}"
        if y is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype), f"Meta's result {n}: {describe(x)}"
            assert not y.numel() or x.stride() == y.stride(), f"Meta's result {n}: {describe(x)}"


def bits(x):
    flat = x.detach().resolve_neg().flatten()  # which keeps any stride of a single element
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def is_jagged(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.jagged


def can_be_copied(x):
    return (
        isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
        and not x.is_meta and not x.is_quantized and x.numel() < 2**24
    )  # fmt: skip
