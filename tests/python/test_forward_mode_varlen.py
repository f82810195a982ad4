"""Forward mode for packed documents: as for each document alone, with every option."""

import pytest
import torch
from common import INF, NO_OPTIONS, dtypes_of
from directions import check_tangents, gradcheck, jvp, seeded
from test_varlen import LSE, cumulative

import qkv
from qkv import testing

H, D, DV = 4, 8, 6
Q_LENGTHS, K_LENGTHS = [3, 1, 0, 20, 4], [4, 6, 3, 17, 0]
N, LONGEST_Q, LONGEST_K = len(Q_LENGTHS), max(Q_LENGTHS), max(K_LENGTHS)
BEFORE, AFTER = 2, 3  # rows outside all documents
SIZES = {
    "query": (BEFORE + sum(Q_LENGTHS) + AFTER, H, D),
    "key": (BEFORE + sum(K_LENGTHS) + AFTER, H, D),
    "value": (BEFORE + sum(K_LENGTHS) + AFTER, H, DV),
    "bias": (N, 1, LONGEST_Q, LONGEST_K),
    "alibi_slopes": (N, H),
    "sinks": (N, H),
}
OPTIONS = {
    "plain": ((), {}),
    "scale": ((), {"scale": -0.3}),
    "window": ((), {"window_size": (3, 1)}),
    "softcap": ((), {"softcap": 1.5}),
    "slopes": (("alibi_slopes",), {}),
    "bias": (("bias",), {"window_size": (-1, 0)}),
    "sinks": (("sinks",), {"window_size": (2, 0)}),
    "dropout": ((), {"dropout_p": 0.4}),
    "some keys": ((), {"seqused_k": torch.tensor([2, 0, 3, 17, 0])}),
    "all": (
        tuple(SIZES)[3:],
        {"softcap": 1.5, "window_size": (5, 0), "dropout_p": 0.2,
         "seqused_k": torch.tensor([4, 3, 0, 11, 0])},
    ),
}  # fmt: skip
ENDS = tuple(cumulative(lengths, start=BEFORE) for lengths in (Q_LENGTHS, K_LENGTHS))


def draw(names):
    names = ("query", "key", "value", *names)
    return {name: torch.randn(SIZES[name]).double() for name in names}


def call(function, inputs, options):
    """(output, lse), where the lse is 0 instead of -inf."""
    query, key, value, *_ = inputs.values()
    more = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
    output, lse = function(
        query, key, value, *ENDS, LONGEST_Q, LONGEST_K, return_aux=LSE, **more, **options
    )
    return output, lse.masked_fill(lse == -INF, 0)


def attend(inputs, **options):
    torch.manual_seed(1)
    return call(qkv.varlen_attn, inputs, options)


def reference(inputs, **options):
    return call(testing.varlen_attn, inputs, seeded(**options))


@pytest.mark.parametrize("case", OPTIONS)
class TestOptions:
    def test_results_and_tangents(self, case):
        names, options = OPTIONS[case]
        check_tangents(attend, reference, draw(names), draw(names), options)

    def test_gradcheck(self, case):
        names, options = OPTIONS[case]
        assert gradcheck(attend, draw(names), options)

    def test_backward_through_the_tangent(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        seeds = [torch.randn_like(x) for x in attend(inputs, **options)]

        def gradients(function):
            results = jvp(function, inputs, tangents, **options)[1]
            return torch.autograd.grad(results, tuple(inputs.values()), seeds, allow_unused=True)

        torch.testing.assert_close(gradients(attend), gradients(reference))

    def test_vmap(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), [draw(names) for _ in range(2)]
        stacked = {name: torch.stack([t[name] for t in tangents]) for name in inputs}

        def f(t):
            return jvp(attend, inputs, t, **options)[1]

        found = torch.vmap(f, randomness="same")(stacked)
        for i, t in enumerate(tangents):
            torch.testing.assert_close(tuple(x[i] for x in found), f(t))


@dtypes_of("f32", "f64", "bf16", "f16")
def test_documents_alone(dtype):
    """The bits of a dense call for each document."""
    inputs, tangents = ({n: x.to(dtype) for n, x in draw(()).items()} for _ in range(2))
    options = {"softcap": 2.0, "window_size": (7, 2)}
    found = jvp(attend, inputs, tangents, **options)

    def dense(x):
        output, lse = qkv.attention(**x, **options, return_lse=True)
        return output.transpose(0, 1), lse.masked_fill(lse == -INF, 0)

    for q, L, k, S in zip(ENDS[0], Q_LENGTHS, ENDS[1], K_LENGTHS, strict=False):
        rows = {"query": (q, L), "key": (k, S), "value": (k, S)}
        alone = [
            {name: x.narrow(0, *rows[name]).transpose(0, 1) for name, x in given.items()}
            for given in (inputs, tangents)
        ]
        for ours, truths in zip(found, jvp(dense, *alone), strict=True):
            assert torch.equal(ours[0].narrow(0, q, L), truths[0])
            assert torch.equal(ours[1].narrow(1, q, L), truths[1])


def test_outside_every_document():
    """What lies there has tangents of 0, and sends none anywhere, not even NaN."""
    inputs, tangents = draw(()), draw(())
    _, expected = jvp(attend, inputs, tangents)
    for given in (inputs, tangents):
        for x in given.values():
            x[:BEFORE] = x[-AFTER:] = torch.nan
    _, (output, lse) = jvp(attend, inputs, tangents)
    torch.testing.assert_close((output, lse), expected)
    for rows in (slice(None, BEFORE), slice(-AFTER, None)):
        assert (output[rows] == 0).all() and (lse[:, rows] == 0).all()


@pytest.mark.parametrize("shape", [(LONGEST_Q, LONGEST_K), (N, H, LONGEST_Q, LONGEST_K)])
def test_mask(shape):
    """attn_mask, which only the operator has, and beside it bias."""
    inputs, tangents = draw(("bias",)), draw(("bias",))
    inputs["attn_mask"], tangents["attn_mask"] = torch.randn(2, *shape).double()
    options = NO_OPTIONS | {"cu_seq_q": ENDS[0], "cu_seq_k": ENDS[1]}

    def both(x):
        output, lse = torch.ops.qkv.attention_forward(**options | x)
        return output, lse.masked_fill(lse == -INF, 0)

    def in_one(x):
        bias = x["bias"] + x["attn_mask"]
        return reference({name: x[name] for name in ("query", "key", "value")} | {"bias": bias})

    found = jvp(both, inputs, tangents)
    torch.testing.assert_close(found, jvp(in_one, inputs, tangents))


def test_any_number_of_threads(threads):
    """Of documents long enough for a team, and more of one than of another."""
    ends = cumulative([300, 40, 0, 220])

    def attend_long(x):
        return qkv.varlen_attn(*x.values(), ends, ends, 300, 300, return_aux=LSE)

    names = ("query", "key", "value")
    inputs, tangents = ({name: torch.randn(560, H, D) for name in names} for _ in range(2))
    results = []
    for n in (1, 2, 5):
        threads(n)
        results.append(jvp(attend_long, inputs, tangents))
    for other in results[1:]:
        for a, b in zip(results[0][0] + results[0][1], other[0] + other[1], strict=True):
            assert torch.equal(a, b)


def test_no_documents_and_no_heads():
    x = torch.randn(5, H, D).double()
    ends = torch.tensor([0])
    f = lambda x: qkv.varlen_attn(x, x, x, ends, ends, 0, 0, return_aux=LSE)  # noqa: E731
    results, tangents = torch.func.jvp(f, (x,), (x,))
    assert all((t == 0).all() for t in tangents) and (results[1] == -INF).all()
    ends = torch.tensor([0, 2, 5])
    g = lambda x: qkv.varlen_attn(x, x, x, ends, ends, 3, 3)  # noqa: E731
    assert torch.func.jvp(g, (x[:, :0],), (x[:, :0],))[1].shape == (5, 0, D)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    inputs, tangents = draw(("bias",)), draw(("bias",))
    f = lambda x, t: jvp(lambda x: call(qkv.varlen_attn, x, {"softcap": 1.5}), x, t)  # noqa: E731
    found = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")(inputs, tangents)
    torch.testing.assert_close(found, f(inputs, tangents))


def test_not_yet():
    """Pages are for inference; third derivatives are still to come, and a tangent's tangent."""
    x = torch.randn(2, 4, H, D)  # [blocks, block size, H, D]
    ends, table = torch.tensor([0, 3]), torch.tensor([[0, 1]])
    paged = lambda q: qkv.varlen_attn(  # noqa: E731
        q, x, x, ends, None, 3, 5, seqused_k=torch.tensor([5]), block_table=table
    )
    query = torch.randn(3, H, D)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives .* not implemented"):
        torch.func.jvp(paged, (query,), (query,))
    inputs = {name: x.requires_grad_() for name, x in draw(()).items()}
    _, (tangent, _) = jvp(attend, inputs, draw(()))
    (first,) = torch.autograd.grad(tangent.sin().sum(), inputs["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="derivatives are not implemented yet"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode derivatives .* not implemented"):
        jvp(lambda x: jvp(attend, x, draw(()))[1], inputs, draw(()))
