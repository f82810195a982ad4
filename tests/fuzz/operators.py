"""The operators, as the fuzzer sees them: how a good call is drawn, and what it must give.

A call is a dict of arguments by name. `hold` compares what a call has returned, and the gradients
that autograd finds, with the f64 reference of tests/python; it raises AssertionError, or whatever
the reference raises at arguments that make no sense.
"""

import dataclasses
from collections.abc import Callable

import held
import torch
from common import NO_OPTIONS
from gradients import LEAVES, is_float
from hypothesis import strategies as st
from strategies import cases
from test_int8_cache import INT8_MEMORY, int8_calls, numbers
from test_kvcache import calls as kvcache_calls
from test_varlen import cumulative, in_blocks

import qkv
from qkv import testing

ops = torch.ops.qkv
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MANUAL_SEED = 3  # torch.manual_seed before each call, so that the reference knows what is dropped


@dataclasses.dataclass
class Operator:
    function: Callable
    arguments: st.SearchStrategy  # of a good call
    hold: Callable  # (arguments, results)
    in_place: tuple = ()  # arguments that the call writes to


def drawn_seed():
    """The seed that qkv::dropout_seed draws after torch.manual_seed(MANUAL_SEED)."""
    torch.manual_seed(MANUAL_SEED)
    return testing.dropout_seed()


# --- good calls ---------------------------------------------------------------------------------


@st.composite
def dense(draw, names, without=()):
    """Arguments of attention and its kin: shapes, strides and options as in tests/python. Scores
    stay small enough for a bound on rounding that holds whatever else happens."""
    case = draw(cases(max_work=20_000))
    scale = case.scale if case.scale is None or abs(case.scale) < 1 else None
    case = dataclasses.replace(case, spread=min(case.spread, 1.0), scale=scale)
    inputs, options = case.tensors(draw(st.sampled_from(DTYPES)))
    call = dict(zip(("query", "key", "value"), inputs, strict=True)) | options
    call = {name: x for name, x in call.items() if name in names and name not in without}
    wanted = draw(st.sets(st.sampled_from(("query", "key", "value", "attn_mask", "bias", "sinks"))))
    for name in ("query", "key", "value", "attn_mask", "bias", "alibi_slopes", "sinks"):
        x = call.get(name)
        if name in wanted | {"alibi_slopes"} and x is not None and x.is_floating_point():
            call[name] = x.requires_grad_()
    return call


@st.composite
def in_any_form(draw, calls):
    """Calls of a function whose spans may also be a Spans, or a BlockMask whose function says the
    same of each pair. Either has the tensor, for what judges the call."""
    call = draw(calls)
    spans, L, S = call.get("spans"), call["query"].size(-2), call["key"].size(-2)
    form = draw(st.sampled_from(["tensor", "Spans", "BlockMask"]))
    if spans is None or form == "tensor":
        return call
    found = qkv.Spans(spans)
    if form == "BlockMask" and spans.dim() <= 4 and 0 not in (*spans.shape, S, L):
        shown = found.to_mask(S)
        shown = shown[(None,) * (4 - shown.dim())].expand(-1, -1, L, -1)
        size = draw(st.sampled_from([2, (1, 3), (32, 16), 128]))
        found = qkv.block_mask(lambda b, h, q, k: shown[b, h, q, k], *shown.shape, BLOCK_SIZE=size)
        found.tensor = spans
    return call | {"spans": found}


@st.composite
def jvp_calls(draw):
    """Calls of attention_jvp: attention's, with tangents of some of its floating tensors."""
    call = {n: x.detach() if torch.is_tensor(x) else x for n, x in draw(dense(SOFT)).items()}
    floating = [n for n in LEAVES if is_float(call.get(n))]
    for name in draw(st.sets(st.sampled_from(floating))):
        call[f"{name}_tangent"] = torch.randn(call[name].shape).to(call[name].dtype)
    return call


def python_attention(return_lse=False, **call):
    return qkv.attention(**call, return_lse=return_lse)


SOFT = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    "window_size", "softcap", "alibi_slopes", "bias", "spans", "sinks",
)  # fmt: skip
PACKED = ("cu_seq_q", "cu_seq_k", "seqused_k")


def low_level(names):
    return {name: NO_OPTIONS.get(name) for name in names}


ATTENTION = (*NO_OPTIONS, "shard")


def seeded(call):
    """The call with the dropout_seed that the user's operator would have drawn."""
    if call.get("dropout_p", 0) > 0:
        call["dropout_seed"] = torch.tensor([drawn_seed()])
    return call


@st.composite
def weights_calls(draw):
    """Calls of attention_weights: attention's without the value and the dimensions that only it
    has."""
    call = draw(with_weights_calls())
    del call["value"]
    return call


@st.composite
def with_weights_calls(draw):
    """Calls of attention_with_weights in which query has all leading dimensions."""
    call = draw(dense(SOFT))
    output = python_attention(**{n: x for n, x in call.items() if n != "dropout_p"})
    grad = call["query"].requires_grad
    query = call["query"].detach().expand(*output.shape[:-1], -1)
    reduce = draw(st.sampled_from(["heads", "queries", None]))
    return call | {"query": query.requires_grad_(grad), "reduce": reduce}


@st.composite
def hard_calls(draw):
    call = draw(dense(SOFT, ("dropout_p", "sinks")))
    return call | {"straight_through": draw(st.booleans())}


@st.composite
def packed_calls(draw, paged=False):
    """Calls of varlen_attention: documents of any lengths, the last rows sometimes outside of
    all."""
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5))
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    D, Dv, outside = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(0, 3))
    torch.manual_seed(draw(st.integers(0, 1000)))
    sums = [sum(x[n] for x in lengths) + (0 if paged else outside) for n in (0, 1)]
    shapes = [(sums[0], Hkv * group, D), (sums[1], Hkv, D), (sums[1], Hkv, Dv)]
    query, key, value = (torch.randn(s).to(dtype) for s in shapes)
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    cu = [cumulative([x[n] for x in lengths], index) for n in (0, 1)]
    longest = [max((x[n] for x in lengths), default=0) for n in (0, 1)]
    call = {"query": query, "key": key, "value": value, "cu_seq_q": cu[0], "cu_seq_k": cu[1]}
    call |= {"max_q": longest[0], "max_k": longest[1], "enable_gqa": group > 1}
    if paged:
        blocks, where = in_blocks((query, key, value, *cu, *longest), draw(st.integers(1, 8)))
        call |= dict(zip(("query", "key", "value"), blocks, strict=False)) | where
        call["cu_seq_k"] = None
    else:
        for name in draw(st.sets(st.sampled_from(("query", "key", "value")))):
            call[name].requires_grad_()
        if draw(st.booleans()):
            call["seqused_k"] = torch.tensor([draw(st.integers(0, x[1])) for x in lengths]).long()
        call["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    for name in ("alibi_slopes", "sinks"):
        lead = draw(st.sampled_from([None, (), (len(lengths),)]))
        if lead is not None:
            call[name] = torch.rand(*lead, Hkv * group, requires_grad=not paged)
    sides = st.sampled_from([-1, -1, 0, 3, 2**40])
    call["window_size"] = draw(st.tuples(sides, sides))
    call["softcap"] = draw(st.sampled_from([0.0, 0.0, 2.0]))
    return call


# --- the gradient operators: given what the forward operator returned --------------------------


def masks(operator):
    """Draws an output_mask: which of its gradients the operator is asked for."""
    count = len(operator.default._schema.returns)
    return st.lists(st.booleans(), min_size=count, max_size=count)


def without_grad(call):
    return {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


@st.composite
def attention_backward_calls(draw):
    call = low_level(ATTENTION) | seeded(without_grad(draw(dense(SOFT))))
    output, lse = ops.attention_forward(**call)
    call |= {"output": output, "logsumexp": lse}
    call["output_mask"] = draw(masks(ops.attention_backward))
    torch.manual_seed(draw(st.integers(0, 1000)))
    grads = torch.randn_like(output), torch.randn_like(lse)
    used = draw(st.sampled_from([(1, 0), (0, 1), (1, 1)]))
    call["grad_output"], call["grad_logsumexp"] = (
        g if u else None for g, u in zip(grads, used, strict=True)
    )
    return call


def draw_tangents(draw, call):
    """Any of the call's floating tensors have a tangent, with strides of its own."""
    tangents = {}
    for name in (*LEAVES, "score_tables"):  # of which no call has any
        x, moves = call.get(name), draw(st.booleans())
        tangent = torch.randn(x.shape).to(x.dtype) if is_float(x) and moves else None
        if tangent is not None and draw(st.booleans()):
            tangent = tangent.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() else tangent
        tangents[f"{name}_tangent"] = tangent
    return tangents


@st.composite
def attention_jvp_calls(draw):
    call = low_level(ATTENTION) | seeded(without_grad(draw(dense(SOFT))))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return call | draw_tangents(draw, call)


@st.composite
def attention_double_backward_calls(draw):
    """With what pass 1 returns, or without it."""
    call = draw(attention_backward_calls())
    call |= draw_tangents(draw, call)
    names = {a.name for a in ops.attention_forward_jvp.default._schema.arguments}
    moved = ops.attention_forward_jvp(**{n: x for n, x in call.items() if n in names})[2:]
    known = draw(st.booleans())
    call["output_tangent"], call["logsumexp_tangent"] = moved if known else (None, None)
    call["output_mask"] = draw(masks(ops.attention_double_backward))
    return call


def backward_of(draw, op, grads, **kept):
    """What a backward operator takes besides the call: gradients of these results, and others."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    grads = {name: torch.randn_like(x) for name, x in grads.items()}
    return grads | kept | {"output_mask": draw(masks(op))}


@st.composite
def weights_backward_calls(draw):
    call = low_level([n for n in NO_OPTIONS if n not in PACKED])
    call |= seeded(without_grad(draw(weights_calls())))
    weights, lse = ops.weights_forward(**call)
    return call | backward_of(draw, ops.weights_backward, {"grad_weights": weights}, logsumexp=lse)


@st.composite
def with_weights_backward_calls(draw):
    call = low_level([n for n in NO_OPTIONS if n not in PACKED])
    call |= seeded(without_grad(draw(with_weights_calls())))
    output, weights, lse = ops.with_weights_forward(**call)
    grads = {"grad_output": output, "grad_weights": weights}
    return call | backward_of(draw, ops.with_weights_backward, grads, output=output, logsumexp=lse)


HARD = (
    "attn_mask", "bias", "spans", "alibi_slopes", "scale", "enable_gqa", "window_size", "softcap",
    "is_causal",
)  # fmt: skip


@st.composite
def hard_backward_calls(draw):
    call = low_level(HARD) | without_grad(draw(hard_calls()))
    output, index = ops.hard_forward(**call)
    return call | backward_of(draw, ops.hard_backward, {"grad_output": output}, index=index)


@st.composite
def through_low_level(draw, calls, names):
    return low_level(names) | seeded(draw(calls))


def drop_lengths(call):
    return {n: x for n, x in call.items() if n not in ("max_q", "max_k")}


# --- all of them --------------------------------------------------------------------------------


def kvcache(**call):
    return qkv.attention_with_kvcache(**call, return_softmax_lse=True)


def hold_kvcache(call, results):
    """Holds a call of attention_with_kvcache. The caches of `call` are copies from before the call
    (one_call in hunt.py makes them)."""
    held.dense_results(call, results, testing.attention_with_kvcache(**call))


def hold_int8(call, results):
    """Likewise, with int8 caches: they and the scales after the call stand for the reference's."""
    k_cache, v_cache, k_scale, v_scale = results[2:]
    after = numbers(k_cache, k_scale), numbers(v_cache, v_scale)
    held.dense_results(call, (*results[:2], *after), testing.attention_with_kvcache(**call))


def seed_only(call, results):
    assert results[0].dtype == torch.int64 and results[0].shape == (1,)
    assert results[0].item() == drawn_seed()


WEIGHTS = tuple(n for n in NO_OPTIONS if n not in PACKED)
OPERATORS = {
    "attention": Operator(ops.attention, dense(SOFT), held.attention),
    "attention_with_lse": Operator(ops.attention_with_lse, dense(SOFT), held.attention),
    "qkv.attention": Operator(
        python_attention,
        st.builds(lambda c, lse: c | {"return_lse": lse}, in_any_form(dense(SOFT)), st.booleans()),
        held.attention,
    ),
    "attention_jvp": Operator(ops.attention_jvp, jvp_calls(), held.attention_jvp),
    "attention_weights": Operator(ops.attention_weights, weights_calls(), held.weights),
    "attention_with_weights": Operator(
        ops.attention_with_weights, with_weights_calls(), held.with_weights
    ),
    "hard_attention": Operator(ops.hard_attention, hard_calls(), held.hard),
    "varlen_attention": Operator(ops.varlen_attention, packed_calls(), held.packed),
    "varlen_attention, paged": Operator(
        ops.varlen_attention, packed_calls(paged=True), held.packed
    ),
    "attention_with_kvcache": Operator(
        kvcache, kvcache_calls(), hold_kvcache, ("k_cache", "v_cache")
    ),
    "attention_with_kvcache, int8": Operator(kvcache, int8_calls(), hold_int8, INT8_MEMORY),
    "dropout_seed": Operator(
        ops.dropout_seed, st.builds(lambda c: {"query": c["query"]}, dense(SOFT)), seed_only
    ),
    "attention_forward": Operator(
        ops.attention_forward, through_low_level(dense(SOFT), ATTENTION), held.attention
    ),
    "attention_forward, packed": Operator(
        ops.attention_forward,
        through_low_level(packed_calls().map(drop_lengths), ATTENTION),
        held.packed,
    ),
    "weights_forward": Operator(
        ops.weights_forward, through_low_level(weights_calls(), WEIGHTS), held.weights
    ),
    "with_weights_forward": Operator(
        ops.with_weights_forward,
        through_low_level(with_weights_calls(), (*WEIGHTS, "value")),
        held.with_weights,
    ),
    "hard_forward": Operator(ops.hard_forward, through_low_level(hard_calls(), HARD), held.hard),
    "attention_backward": Operator(
        ops.attention_backward, attention_backward_calls(), held.attention_backward
    ),
    "attention_double_backward": Operator(
        ops.attention_double_backward,
        attention_double_backward_calls(),
        held.attention_double_backward,
    ),
    "attention_forward_jvp": Operator(
        ops.attention_forward_jvp, attention_jvp_calls(), held.attention_forward_jvp
    ),
    "weights_backward": Operator(
        ops.weights_backward, weights_backward_calls(), held.weights_backward
    ),
    "with_weights_backward": Operator(
        ops.with_weights_backward, with_weights_backward_calls(), held.with_weights_backward
    ),
    "hard_backward": Operator(ops.hard_backward, hard_backward_calls(), held.hard_backward),
}
