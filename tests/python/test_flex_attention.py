"""qkv.flex_attention: what torch's function computes, with gradients, in every way to call it."""

import functools
import inspect

import pytest
import torch
from common import COMPILERS
from flex_functions import INF, MASK_MODS, SCORE_MODS, B, H, L, S, numbers
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv._recorded import Refused
from qkv._score_function.arguments import program_of
from qkv._score_function.recognise import options_of

D = 8
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def inputs(dtype=torch.float64, L=L):
    sizes = ((B, H, L, D), (B, H, S, D), (B, H, S, D))
    return [numbers(*x, seed=n, dtype=dtype).requires_grad_() for n, x in enumerate(sizes)]


def over(function, *leading):
    """The function for all b, h, q and k: `[B, H, L, S]`. leading: scores, or nothing."""
    front = (0,) * len(leading)
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        function = torch.vmap(function, (*front, *dims))
    function = torch.vmap(function, (*front, 0, None, None, None))
    sizes = (B, H, L, S) if not leading else leading[0].shape
    with TransformGetItemToIndex():
        return function(*leading, *(torch.arange(n) for n in sizes))


def mask_of(mask_mod, L=L, S=S):
    """`[B, H, L, S]`."""
    return over(mask_mod)[:, :, :L, :S]


def composed(query, key, value, score_mod=None, mask_mod=None):
    scores = query @ key.mT / D**0.5
    if score_mod is not None:
        scores = over(getattr(score_mod, "by_one_index", score_mod), scores)
    if mask_mod is not None:
        scores = scores.where(mask_of(mask_mod), -INF)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().where(lse[..., None] > -INF, 0) @ value, lse


def gradients(results, tensors):
    total = sum(x.where(x > -INF, 0).sin().sum() for x in results)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return torch.autograd.grad(total, tensors, **options)


def assert_same(found, true, tensors):
    torch.testing.assert_close(found, true)
    torch.testing.assert_close(gradients(found, tensors), gradients(true, tensors))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_of_torchs_test(name):
    score_mod, learned = SCORE_MODS[name]()
    query, key, value = inputs()
    tensors = [query, key, value, *(x.requires_grad_() for x in learned)]
    found = qkv.flex_attention(query, key, value, score_mod, return_lse=True)
    assert_same(found, composed(query, key, value, score_mod), tensors)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods_of_torchs_test(name):
    mask_mod = MASK_MODS[name]()
    mask = create_block_mask(mask_mod, B, H, L, S, device="cpu", BLOCK_SIZE=8)
    tensors = inputs()
    true = composed(*tensors, mask_mod=mask_mod)
    assert_same(qkv.flex_attention(*tensors, block_mask=mask, return_lse=True), true, tensors)


COMPILED = [
    "documents",
    "relative bias",
    "symmetric",
    "branch that adds",
    "computed bias",
    "jagged",
]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("backend", COMPILERS)
def test_compiled(name, is_made_inside, backend):
    score_mod, learned = SCORE_MODS[name]()
    tensors = [*inputs(), *(x.requires_grad_() for x in learned)]
    mask = create_block_mask(MASK_MODS["documents"](), B, None, L, S, device="cpu", BLOCK_SIZE=8)

    def call(query, key, value, *_):
        inner = lambda *args: score_mod(*args) * 2  # noqa: E731
        function = inner if is_made_inside else score_mod
        return qkv.flex_attention(query, key, value, function, mask, return_lse=True)

    found = torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    assert_same(found, call(*tensors), tensors)


@pytest.mark.parametrize("name", ["identity", "changed in place", "one storage"])
def test_compiled_where_memory_is_shared(name):
    """Of a function's result and its score, or of two captured tensors. Unless told otherwise,
    torch 2.15 refuses that in the functions of higher order operators."""
    score_mod, _ = SCORE_MODS[name]()
    tensors = [x.detach() for x in inputs()]  # a score that requires grad is not changed in place

    def call(*tensors):
        return qkv.flex_attention(*tensors, score_mod)

    found = torch.compile(call, fullgraph=True, backend="eager")(*tensors)
    torch.testing.assert_close(found, call(*tensors))


def refused_for_its_operation(s, b, h, q, k):
    return torch.erf(s * 2)


def refused_for_its_branch(s, b, h, q, k):
    return s if q > k else s * 2


@pytest.mark.parametrize("score_mod", [refused_for_its_operation, refused_for_its_branch])
def test_refused_in_torch_compile(score_mod):
    line = f'test_flex_attention.py", line {score_mod.__code__.co_firstlineno + 1}'
    call = functools.partial(qkv.flex_attention, *inputs(), score_mod)
    with pytest.raises(Refused, match=line):
        torch.compile(call, backend="eager")()
    torch.compiler.reset()
    words = "branching" if score_mod is refused_for_its_branch else line
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(call, backend="eager", fullgraph=True)()


def test_traced_after_a_graph_break():
    """A function that torch.compile cannot look into."""
    table = numbers(H)
    hidden = torch.compiler.disable(lambda s, h: s * table[h])
    call = functools.partial(program_of, lambda s, b, h, q, k: hidden(s, h), inputs()[0])
    found, true = torch.compile(call, backend="eager")(), call()
    assert found[:2] == true[:2] and found[2].equal(table) and found[3] is None


def test_compiled_for_any_number():
    """That torch.compile makes a symbol of, once it has changed."""
    tensors = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)

    def call(cap):
        double = cap * 2
        return qkv.flex_attention(*tensors, lambda s, *_: double * torch.tanh(s / cap))

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for cap in (1.5, 2.5, 3.25):
        torch.testing.assert_close(compiled(cap), call(cap))


@pytest.mark.parametrize("samples", [0, 2])
def test_compiled_samples_with_tables(samples):
    tensors, table = torch.randn(3, samples, 1, H, 5, 8), torch.randn(samples, H)

    def call(query, key, value, table):
        return qkv.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[h])

    compiled = torch.compile(torch.vmap(call), fullgraph=True, backend="eager")
    found, true = (run(*tensors, table) for run in (compiled, torch.vmap(call)))
    torch.testing.assert_close(found, true)


def test_compiled_with_numbers_beyond_int32():
    tensors = torch.randn(3, 1, 2, 5, 8)

    def call(ids):
        return qkv.flex_attention(*tensors, lambda s, b, h, q, k: s + ids[k])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ids = torch.arange(5)
    torch.testing.assert_close(compiled(ids), call(ids))
    with pytest.raises(RuntimeError, match="score_mod: .* numbers of int32 are expected"):
        compiled(ids + 2**32)


def test_compiled_for_an_attribute_that_changes():
    """Of which torch.compile makes an item of a tensor, since only the function reads it."""
    tensors, module = torch.randn(3, 1, 2, 5, 8), torch.nn.Module()
    score_mod = lambda s, b, h, q, k: module.cap * torch.tanh(s / module.cap) + q * module.cap  # noqa: E731
    call = lambda: qkv.flex_attention(*tensors, score_mod)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for module.cap in (1.5, 2.5, 3.25):
        torch.testing.assert_close(compiled(), call())


def test_compiled_for_any_length():
    table = numbers(H, 2 * S)
    count = CompileCounterWithBackend("aot_eager")

    def call(query, key, value):
        return qkv.flex_attention(
            query, key, value, lambda s, b, h, q, k: torch.where(q >= k, s + table[h, q - k], -INF)
        )

    compiled = torch.compile(call, fullgraph=True, backend=count, dynamic=True)
    counts = []
    for n in (10, 14, 20):
        tensors = inputs(L=n)
        torch.testing.assert_close(compiled(*tensors), call(*tensors))
        counts.append(count.frame_count)
    assert counts[-1] == counts[0]


def test_a_mask_of_many_spans():
    is_seen = torch.rand(L, S, generator=torch.Generator().manual_seed(0)) > 0.5
    mask_mod = lambda b, h, q, k: is_seen[q, k % 32]  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, L, S, device="cpu", BLOCK_SIZE=8)
    mask._qkv_is_no_spans = True
    tensors = inputs()
    found = qkv.flex_attention(*tensors, block_mask=mask, return_lse=True)
    assert_same(found, composed(*tensors, mask_mod=mask_mod), tensors)


@pytest.mark.parametrize("step", [2, 80])
def test_a_mask_is_counted_once(step):
    """Of 80 spans, which are too many, and of 2."""
    query, key, value = (x.repeat(1, 1, 5, 1) for x in inputs())
    sizes = (None, None, 5 * L, 5 * S)
    mask = create_block_mask(lambda b, h, q, k: k % step == 0, *sizes, device="cpu")
    true = scaled_dot_product_attention(query, key[:, :, ::step], value[:, :, ::step])
    for _ in range(2):
        torch.testing.assert_close(qkv.flex_attention(query, key, value, block_mask=mask), true)
    assert hasattr(mask, "_qkv_is_no_spans") == (step == 2)


def _lists(*firsts):
    """Of three rows of four blocks: one that counts, others behind it."""
    return torch.tensor([[[[n, (n + 1) % 4, (n + 2) % 4, (n + 3) % 4] for n in firsts]]]).int()


def test_blocks_are_what_their_lists_say():
    counts, blocks = torch.tensor([[[1, 0, 1]]]).int(), _lists(1, 2, 3)
    full = torch.tensor([[[1, 1, 0]]]).int(), _lists(3, 0, 0)
    mask = BlockMask.from_kv_blocks(
        counts, blocks, *full, BLOCK_SIZE=8, mask_mod=lambda b, h, q, k: k % 2 == 0,
        seq_lengths=(L, S),
    )  # fmt: skip
    i, j = torch.arange(L)[:, None], torch.arange(S)
    kinds = torch.tensor([[0, 1, 0, 2], [2, 0, 0, 0], [0, 0, 0, 1]])[i // 8, j // 8]
    seen = (kinds == 2) | ((kinds == 1) & (j % 2 == 0))
    tensors = inputs()
    true = composed(*tensors, mask_mod=lambda b, h, q, k: seen[q, k])
    by_spans = qkv.flex_attention(*tensors, block_mask=mask, return_lse=True)
    assert_same(by_spans, true, tensors)
    del mask._qkv_spans
    mask._qkv_is_no_spans = True
    assert_same(qkv.flex_attention(*tensors, block_mask=mask, return_lse=True), true, tensors)


TABLE, SLOPES = numbers(H, L, S, dtype=torch.float32), numbers(H, dtype=torch.float32)
RECOGNISED = {
    "soft cap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), {"softcap": 20.0}),
    "soft cap, turned": (lambda s, b, h, q, k: torch.tanh(s / 20) * 20, {"softcap": 20.0}),
    "causal": (lambda s, b, h, q, k: torch.where(k <= q, s, -INF), {"is_causal": True}),
    "masked_fill": (lambda s, b, h, q, k: s.masked_fill(q < k, -INF), {"is_causal": True}),
    "window, turned": (
        lambda s, b, h, q, k: torch.where(torch.tensor(9) > (q - k).abs(), s, -INF),
        {"window_size": (16, 0)},
    ),
    "window": (
        lambda s, b, h, q, k: torch.where((q - k).abs() < 9, s, -INF), {"window_size": (16, 0)}
    ),
    "causal, window": (
        lambda s, b, h, q, k: torch.where((q >= k) & (q - k <= 3), s, -INF),
        {"is_causal": True, "window_size": (11, -1)},
    ),
    "bias": (lambda s, b, h, q, k: TABLE[h, q, k] + s, {"bias": (1, H, L, S)}),
    "capped, causal": (
        lambda s, b, h, q, k: torch.where(q >= k, 5.0 * torch.tanh(s / 5.0) + TABLE[h, q, k], -INF),
        {"is_causal": True, "softcap": 5.0, "bias": (1, H, L, S)},
    ),
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), {"alibi_slopes": (H,)}),
    "alibi, negated": (
        lambda s, b, h, q, k: s + -(SLOPES[h] * (q - k).abs()), {"alibi_slopes": (H,)}
    ),
    "causal alibi": (
        lambda s, b, h, q, k: torch.where(q >= k, s + (k - q) * SLOPES[h], -INF),
        {"is_causal": True, "alibi_slopes": (H,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(name):
    score_mod, expected = RECOGNISED[name]
    n = S if "alibi" in name else L
    query, key, value = inputs(torch.float32, n)
    text, known, tables, _ = program_of(score_mod, query)
    left, found = options_of(text, known, tables, (B, H, n, S), ())
    found = {name: getattr(x, "shape", x) for name, x in found.items()}
    assert (left, found) == ("", expected)
    found = qkv.flex_attention(query, key, value, score_mod)
    true = composed(query, key, value, score_mod)[0]
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


def test_tables_whose_numbers_do_not_matter():
    table, ids = torch.randn(L, requires_grad=True), torch.arange(L)
    query, key, value = inputs(torch.float32)
    found = qkv.flex_attention(
        query, key, value, lambda s, b, h, q, k: s * (table[q] ** 0 + ids[q] ** 0)
    )
    torch.testing.assert_close(found, qkv.attention(query * 2, key, value, enable_gqa=True))
    found.sum().backward()
    assert not table.grad.any()


NOT_RECOGNISED = {
    "other caps": lambda s, b, h, q, k: 20 * torch.tanh(s / 30),
    "capped twice": lambda s, b, h, q, k: 2 * torch.tanh(2 * torch.tanh(s / 2) / 2),
    "bias, then capped": lambda s, b, h, q, k: 20 * torch.tanh((s + TABLE[h, q, k]) / 20),
    "two biases": lambda s, b, h, q, k: s + TABLE[h, q, k] + TABLE[0, q, k],
    "bias taken off": lambda s, b, h, q, k: s - TABLE[h, q, k],
    "alibi of other lengths": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "relative": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "of the query's head": lambda s, b, h, q, k: s + SLOPES[h] * (q - k).abs(),
    "hidden by a number": lambda s, b, h, q, k: torch.where(q >= k, s, -1e9),
    "hidden by the sum": lambda s, b, h, q, k: torch.where(q + k <= 9, s, -INF),
    "hidden by the double": lambda s, b, h, q, k: torch.where(2 * q >= k, s, -INF),
    "either": lambda s, b, h, q, k: torch.where((q >= k) | (k < 4), s, -INF),
    "order of booleans": lambda s, b, h, q, k: torch.where(
        (q > 9) <= (k > 9), s + (q > k).sign(), s + torch.clamp_min(q > k, k > 9)
    ),
    "strictly before": lambda s, b, h, q, k: torch.where(q > k + 9, s, -INF),
}


@pytest.mark.parametrize("name", NOT_RECOGNISED)
def test_not_recognised(name):
    query, key, value = inputs(torch.float32)
    text, known, tables, _ = program_of(NOT_RECOGNISED[name], query)
    assert options_of(text, known, tables, (B, H, L, S), ()) == (text, {})
    found = qkv.flex_attention(query, key, value, NOT_RECOGNISED[name])
    true = composed(query, key, value, NOT_RECOGNISED[name])[0]
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


def test_options_beside_a_function():
    query, key, value = inputs()
    capped = lambda s, b, h, q, k: torch.where(q >= k, 5 * torch.tanh(s / 5), -INF)  # noqa: E731
    bias = numbers(L, S)
    found = qkv.flex_attention(query, key, value, capped, softcap=3.0, bias=bias)
    true = composed(
        query, key, value,
        lambda s, b, h, q, k: capped(3 * torch.tanh(s / 3), b, h, q, k) + bias[q, k],
    )[0]  # fmt: skip
    torch.testing.assert_close(found, true)
    window = lambda s, b, h, q, k: torch.where((q - k).abs() < 9, s, -INF)  # noqa: E731
    found = qkv.flex_attention(query, key, value, window, window_size=(S - L, -1))
    both = lambda s, b, h, q, k: torch.where((q <= k) & (k < q + 9), s, -INF)  # noqa: E731
    torch.testing.assert_close(found, composed(query, key, value, both)[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_auxiliary_results(compiled):
    call = functools.partial(qkv.flex_attention, *inputs())
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    output, lse = call(return_lse=True)
    for request in (AuxRequest(), AuxRequest(lse=True)):
        found, aux = call(return_aux=request)
        assert found.equal(output) and aux.max_scores is None
        assert (aux.lse is None) if not request.lse else aux.lse.equal(lse)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["times two", "causal", "jagged", "bias of all", "even keys"])
def test_greatest_scores(name, compiled):
    query, key, value = inputs()
    score_mod, mask_mod = SCORE_MODS[name]()[0], MASK_MODS["padding"]()
    mask = create_block_mask(mask_mod, B, None, L, S, device="cpu", BLOCK_SIZE=8)
    scores = over(score_mod, query @ key.mT / D**0.5).where(over(mask_mod), -INF)
    call = functools.partial(qkv.flex_attention, query, key, value, score_mod, mask)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    output, aux = call(return_aux=AuxRequest(max_scores=True), sinks=numbers(H))
    assert aux.lse is None and not aux.max_scores.requires_grad and output.requires_grad
    torch.testing.assert_close(aux.max_scores, scores.amax(-1).detach())


ERRORS = {
    "return_aux is .* and return_lse": (
        ValueError,
        {"return_lse": True, "return_aux": AuxRequest()},
    ),
    "score_mod is 3": (ValueError, {"score_mod": 3}),
    "for 8 queries and 32 keys": (ValueError, {"block_mask": (1, 1, 8, S)}),
    "for 3 heads": (ValueError, {"block_mask": (1, 3, L, S)}),
    "unexpected keyword argument 'sofcap'": (TypeError, {"sofcap": 2.0}),
    "aten.erf": (ValueError, {"score_mod": lambda s, b, h, q, k: torch.erf(s)}),
}


def test_a_sliced_mask_is_an_error():
    mask = create_block_mask(MASK_MODS["causal"](), B, H, L, S, device="cpu")[:, :1]
    with pytest.raises(RuntimeError, match="block_mask is sliced"):
        qkv.flex_attention(*inputs(), block_mask=mask)


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words):
    kind, options = ERRORS[words]
    if "block_mask" in options:
        sizes = options["block_mask"]
        options = {"block_mask": create_block_mask(MASK_MODS["causal"](), *sizes, device="cpu")}
    with pytest.raises(kind, match=words):
        qkv.flex_attention(*inputs(), **options)


def test_options_that_torchs_function_has_not():
    query = torch.empty(1, 2, 4, 8, device="meta")
    with pytest.raises(NotImplementedError, match="no alibi_slopes is expected there"):
        qkv.flex_attention(query, query, query, alibi_slopes=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="only supported on CUDA"):  # as torch says it
        qkv.flex_attention(query, query, query)


def test_the_signature_is_torchs():
    ours, torchs = (inspect.signature(f).parameters for f in (qkv.flex_attention, flex_attention))
    assert [*ours][: len(torchs)] == [*torchs]
    for name, x in torchs.items():
        assert (ours[name].kind, ours[name].default) == (x.kind, x.default)


def test_heads_are_shared_only_if_asked_for():
    query, key, value = inputs()
    few = key[:, :2], value[:, :2]
    with pytest.raises(ValueError, match="key is of 2 heads"):
        qkv.flex_attention(query, *few)
    with pytest.raises(NotImplementedError, match="query is 3-D"):
        qkv.flex_attention(query[0], *few)
    repeated = (x.repeat_interleave(2, 1) for x in few)
    score_mod = SCORE_MODS["head factor"]()[0]
    found = qkv.flex_attention(query, *few, score_mod, enable_gqa=True)
    torch.testing.assert_close(found, composed(query, *repeated, score_mod)[0])


class TestReplaceFlex:
    def test_trains_whoever_calls_it(self):
        score_mod, learned = SCORE_MODS["relative bias"]()
        tensors = [*inputs(), learned[0].requires_grad_()]
        true = composed(*tensors[:3], score_mod)
        with qkv.replace_flex():
            for call in (flex_attention, torch.compile(flex_attention, backend="aot_eager")):
                output, aux = call(*tensors[:3], score_mod, return_aux=AuxRequest(lse=True))
                assert_same((output, aux.lse), true, tensors)

    def test_is_undone_exactly(self):
        before = flex_attention.__code__
        first, second = qkv.replace_flex(), qkv.replace_flex()
        with qkv.replace_flex():
            assert flex_attention.__code__ is not before
        first.undo()
        first.undo()
        assert flex_attention.__code__ is not before
        second.undo()
        assert flex_attention.__code__ is before
        with pytest.raises(NotImplementedError, match="backward on CPU"):
            flex_attention(*inputs())

    def test_functions_compiled_before_are_compiled_anew(self):
        compiled = torch.compile(lambda *x: flex_attention(*x), backend="eager")
        tensors = [x.detach() for x in inputs()]
        true = compiled(*tensors)
        with qkv.replace_flex():
            found = compiled(*inputs())
        assert found.requires_grad
        torch.testing.assert_close(found.detach(), true)
        torch.testing.assert_close(compiled(*tensors), true)

    def test_what_qkv_does_not_cover_goes_to_torch(self):
        with qkv.replace_flex():
            with pytest.raises(ValueError, match="only supported on CUDA"):
                flex_attention(*(torch.empty(1, 1, 4, 8, device="meta") for _ in "qkv"))


class TestDerivatives:
    """Beside the gradients above: of other orders, directions and samples."""

    def setup_method(self):
        self.tensors = [x[:, :2, :5, :3].detach().requires_grad_() for x in inputs()]
        self.table = numbers(2, 12).requires_grad_()

    @staticmethod
    def call(query, key, value, table):
        def score_mod(s, b, h, q, k):
            return torch.where(q >= k, torch.sin(s) * 2 + table[h, q - k + 5].exp(), -INF)

        return qkv.flex_attention(query, key, value, score_mod)

    def test_of_two_orders_and_in_a_direction(self):
        tensors = (*self.tensors, self.table)
        assert torch.autograd.gradcheck(self.call, tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(self.call, tensors)

    def test_samples_of_everything(self):
        tensors = [torch.stack([x, 2 * x]).detach() for x in (*self.tensors, self.table)]
        for batched in range(4):
            dims = [0 if n == batched else None for n in range(4)]
            given = [x if n == batched else x[0] for n, x in enumerate(tensors)]
            found = torch.vmap(self.call, tuple(dims))(*given)
            for n in range(2):
                one = [x[n] if m == batched else x for m, x in enumerate(given)]
                torch.testing.assert_close(found[n], self.call(*one))
        ids = torch.stack([torch.arange(5) // 2, torch.arange(5) // 3])
        tensors = self.tensors

        def documents(ids):
            return qkv.flex_attention(
                *tensors, lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -INF)
            )

        found = torch.vmap(documents)(ids)
        torch.testing.assert_close(found, torch.stack([documents(x) for x in ids]))

        def without_tables(query):
            return qkv.flex_attention(query, *tensors[1:], lambda s, b, h, q, k: s * (b + 1))

        query = torch.stack([tensors[0], 2 * tensors[0]])
        found = torch.vmap(without_tables)(query)
        torch.testing.assert_close(found, torch.stack([without_tables(x) for x in query]))

    def test_no_samples(self):
        tensors = [x.detach() for x in (*self.tensors, self.table)]
        gradients = torch.func.grad(lambda *x: self.call(*x).sum(), (0, 3))
        for outer in (0, 2):
            batches = [x.expand(outer, 0, *x.shape) for x in tensors]
            found = torch.vmap(torch.vmap(gradients))(*batches)
            assert [x.shape for x in found] == [batches[0].shape, batches[3].shape]

    def test_a_table_in_torch_func(self):
        tensors = [x.detach() for x in self.tensors]

        def of_table(table):
            return self.call(*tensors, table).sum()

        table = self.table.detach()
        found = torch.func.grad(of_table)(table)
        true = torch.autograd.grad(of_table(self.table), self.table)[0]
        torch.testing.assert_close(found, true)
        assert torch.func.hessian(of_table)(table).shape == (2, 12, 2, 12)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(numbers(H, 2 * S))
        self.register_buffer("ids", torch.arange(2 * S) // 5)

    def score_mod(self, s, b, h, q, k):
        return torch.where(self.ids[q] == self.ids[k], s + self.table[h, q - k], -INF)

    def forward(self, query, key, value):
        return qkv.flex_attention(query, key, value, self.score_mod)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_any_length(strict):
    layer, tensors = Layer(), tuple(x.detach() for x in inputs())
    length = torch.export.Dim("length", min=4, max=60)
    sizes = ({2: length}, None, None)
    program = torch.export.export(layer, tensors, strict=strict, dynamic_shapes=sizes).module()
    for n in (L, 9):
        others = tuple(x.detach() for x in inputs(L=n))
        torch.testing.assert_close(program(*others), layer(*others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    score_mod, learned = SCORE_MODS["distinct"]()
    rounded = [x.to(dtype) for x in learned]
    tensors = [x.detach().requires_grad_() for x in inputs(dtype)]

    def of(tables):
        first, second = tables
        return lambda s, b, h, q, k: torch.where(q >= k, s + first[q] + second[k], -INF)

    tables = [x.detach().requires_grad_() for x in rounded]
    found = qkv.flex_attention(*tensors, of(tables))
    grads = torch.autograd.grad(found.double().sin().sum(), (*tensors, *tables))
    wide = [x.detach().double().requires_grad_() for x in (*tensors, *tables)]
    true = composed(*wide[:3], of(wide[3:]))[0]
    true_grads = torch.autograd.grad(true.sin().sum(), wide)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for x, y in zip((found, *grads), (true, *true_grads), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MASK_MODS)
def test_masks_without_their_spans(name):
    """As in torch.compile: by blocks, and by the function within them."""
    mask_mod = MASK_MODS[name]()
    mask = create_block_mask(mask_mod, B, None, L - 3, S - 1, device="cpu", BLOCK_SIZE=(4, 8))
    mask._qkv_is_no_spans = True
    query, key, value = inputs()
    tensors = query[:, :, :-3], key[:, :, :-1], value[:, :, :-1]
    found = qkv.flex_attention(*tensors, block_mask=mask, return_lse=True)
    scores = (tensors[0] @ tensors[1].mT / D**0.5).where(mask_of(mask_mod, L - 3, S - 1), -INF)
    torch.testing.assert_close(found[1], scores.logsumexp(-1))
    assert not found[0].isnan().any()


@pytest.mark.parametrize("size", [0, 1])
def test_elements_outside_of_a_table(size):
    """They are NaN, as those of a table are that has none."""
    table = torch.zeros(size)
    query, key, value = inputs(torch.float32)
    output = qkv.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[q])
    assert output[:, :, size:].isnan().all() and not output[:, :, :size].isnan().any()


def test_checkpointing_and_autocast():
    score_mod, learned = SCORE_MODS["gate"]()
    tensors = [*inputs(torch.float32), learned[0].requires_grad_()]

    def call(query, key, value, _):
        return qkv.flex_attention(query, key, value, score_mod)

    def saved(*x):
        return torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)

    true = torch.autograd.grad(call(*tensors).sin().sum(), tensors)
    found = torch.autograd.grad(saved(*tensors).sin().sum(), tensors)
    assert all(x.equal(y) for x, y in zip(found, true, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(*tensors).dtype == torch.bfloat16


def test_a_window_in_a_graph_for_any_size():
    """Which window_size it is follows from the sizes of a call."""

    def near(score, b, h, q, k):
        return torch.where((q - k).abs() <= 3, score, -INF)

    def call(*x):
        return qkv.flex_attention(*x, near)

    query, key, value = (x.detach() for x in inputs())
    graph = make_fx(call, tracing_mode="symbolic")(
        query[..., :6, :], key[..., :9, :], value[..., :9, :]
    )
    x = query[..., :5, :], key[..., :9, :], value[..., :9, :]
    torch.testing.assert_close(graph(*x), call(*x))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_recorded_with_a_table(mode):
    """Its sizes stay those that it had, and others are refused: looked up by the old ones they
    would be wrong numbers."""

    def call(x, table):
        return qkv.flex_attention(x, x, x, lambda s, b, h, i, j: s + table[h, j])

    x, table = torch.randn(2, 3, 4, 8), torch.randn(3, 4)
    graph = make_fx(call, tracing_mode=mode)(x, table)
    assert torch.equal(graph(x, table), call(x, table))
    with pytest.raises(RuntimeError, match=r"score_tables has the shape \[18\], but .* reads 12"):
        graph(x, torch.randn(3, 6))


def test_a_cap_too_small_for_the_option_is_a_program():
    """1 / 1e-42 is infinite in float32, which `softcap` refuses; tanh of infinity is 1."""
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    found = qkv.flex_attention(query, key, value, lambda s, *_: 1e-42 * torch.tanh(s / 1e-42))
    torch.testing.assert_close(found, value.mean(-2, keepdim=True).expand_as(found))
