"""qkv.latent_attention: by both ways the attention to keys and values written out."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from common import COMPILERS, INF, assert_example_runs, dtypes_of, products
from latent import DV, NAMES, H, L, S, in_rows, make, torchs, truth
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import testing

WAYS = {"absorbed": True, "expanded": False}
both_ways = pytest.mark.parametrize("absorb", WAYS.values(), ids=WAYS)
# By the largest of few errors, which is a matter of luck: absorbing rounds the queries behind
# key_weight and the output in front of value_weight, where torch's way rounds keys and values.
# test_many_numbers holds the errors as a whole.
TIMES = 3


def random_spans():
    ends = torch.randint(S + 1, (2, H, L, 4), dtype=torch.int32)
    return ends.sort(-1).values


OPTIONS = {
    "nothing": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window_size": (3, 1)},
    "softcap": lambda: {"softcap": 1.5},
    "slopes": lambda: {"alibi_slopes": torch.rand(2, H)},
    "bool mask": lambda: {"attn_mask": torch.rand(2, 1, L, S) > 0.4},
    "mask": lambda: {"attn_mask": torch.randn(L, S)},
    "bias": lambda: {"bias": torch.randn(H, 1, S)},
    "spans": lambda: {"spans": random_spans()},
    "sinks": lambda: {"sinks": torch.randn(H)},
    "scale": lambda: {"scale": -0.7},
    "indices": lambda: {"indices": torch.randint(-1, S, (2, L, 4))},
    "all": lambda: {
        "attn_mask": torch.randn(L, S).masked_fill(torch.rand(L, S) < 0.2, -INF),
        "bias": torch.randn(2, H, L, S), "spans": random_spans(), "sinks": torch.randn(2, H),
        "alibi_slopes": torch.rand(H), "window_size": (6, 3), "softcap": 2.0, "scale": 0.4,
        "is_causal": True,
    },
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def in_a_mask(options):
    """The options with what the reference has no indices for."""
    if (indices := options.get("indices")) is None:
        return options
    rest = {n: x for n, x in options.items() if n != "indices"}
    return rest | {"attn_mask": (indices[..., None] == torch.arange(S)).any(-2).unsqueeze(1)}


def attend(call, **options):
    return qkv.latent_attention(**call, **options, return_lse=True)


def loss_of(results):
    return sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results)


class TestAgainstTheFormula:
    @pytest.mark.usefixtures("isa")
    @both_ways
    @dtypes_of("f32", "bf16", "f16")
    def test_many_numbers(self, dtype, absorb):
        """Output, lse and gradients by the root mean square, a steady number here. Of the lse, an
        error of an absorbed query is that of a whole row."""
        call = make(H=4, L=40, S=150, N=32, R=16, C=64, Dv=32, dtype=dtype, grad=True)
        found, expected, theirs = (
            [*(results := f(call)), *torch.autograd.grad(loss_of(results), [*call.values()])]
            for f in (lambda x: attend(x, absorb=absorb), truth, torchs)
        )
        for n, tensors in enumerate(zip(found, expected, theirs, strict=True)):
            testing.assert_as_accurate(*tensors, times=2 if n == 1 else 1.5)

    @pytest.mark.usefixtures("few_rows", "isa")
    @pytest.mark.parametrize("lead, L", [((), 1), ((2,), 1), ((2, 2), 2)])
    @dtypes_of("f32", "bf16", "f16")
    def test_few_rows(self, dtype, lead, L):
        """Where nobody can ask for a derivative, the core library multiplies them by the weights,
        which are parts of one, as in models."""
        call = make(lead, H=4, L=L, S=50, N=32, R=16, C=64, Dv=48, dtype=dtype)
        parts = torch.cat([call["key_weight"], call["value_weight"]], 1).split([32, 48], 1)
        call |= dict(zip(("key_weight", "value_weight"), parts, strict=True))
        with torch.no_grad():
            found = attend(call, absorb=True)
            assert not products(lambda: attend(call, absorb=True), "aten::bmm")
        assert products(lambda: attend(call, absorb=True), "aten::bmm") == 2
        testing.assert_as_accurate(found[0], truth(call)[0], torchs(call)[0], times=1.5)

    @both_ways
    @every_option
    @dtypes_of("f32", "f64", "bf16", "f16")
    def test_options(self, dtype, options, absorb):
        call, options = make(dtype=dtype), options()
        masked = in_a_mask(options)
        expected, theirs = truth(call, **masked), torchs(call, **masked)
        found = attend(call, **options, absorb=absorb)
        assert (found[0].dtype, found[1].dtype) == (theirs[0].dtype, theirs[1].dtype)
        testing.assert_close(found, expected, theirs, times=TIMES)
        again = attend(in_rows(call), **options, absorb=absorb)
        testing.assert_close(again, expected, theirs, times=TIMES)
        assert torch.equal(qkv.latent_attention(**call, **options, absorb=absorb), found[0])

    @both_ways
    @every_option
    @dtypes_of("f32", "f64")
    def test_gradients(self, dtype, options, absorb):
        call, options = make(dtype=dtype, grad=True), options()
        floating = [
            n for n, x in options.items() if isinstance(x, Tensor) and x.is_floating_point()
        ]
        leaves = call | {n: options[n].requires_grad_() for n in floating}
        found, expected, theirs = (
            torch.autograd.grad(loss_of(f(call)), [*leaves.values()])
            for f in (
                lambda x: attend(x, **options, absorb=absorb),
                lambda x: truth(x, **in_a_mask(options)),
                lambda x: torchs(x, **in_a_mask(options)),
            )
        )
        testing.assert_close(found, expected, theirs, times=TIMES)

    @both_ways
    def test_gradients_of_rows(self, absorb):
        call = make(grad=True)
        rows = in_rows(call)["latents"].detach().requires_grad_()
        expected = torch.autograd.grad(loss_of(truth(call)), [*call.values()])
        used = call | {"latents": rows, "rope_keys": None}
        del call["rope_keys"]
        found = torch.autograd.grad(
            loss_of(attend(used, absorb=absorb)), [*(call | {"latents": rows}).values()]
        )
        expected = [*expected[:2], torch.cat(expected[2:4], -1), *expected[4:]]
        testing.assert_close(found, expected)

    def test_dropout(self):
        """What is dropped follows from the seed, whichever way is taken."""
        call = make()
        torch.manual_seed(7)
        seed = testing.dropout_seed()
        expected = truth(call, dropout_p=0.4, dropout_seed=seed)
        assert (expected[0] - truth(call)[0]).abs().max() > 0.1
        for absorb in WAYS.values():
            torch.manual_seed(7)
            testing.assert_close(attend(call, dropout_p=0.4, absorb=absorb), expected)

    @both_ways
    @pytest.mark.parametrize("lead", [(), (3, 2), (2, 1, 3), (0,)], ids=str)
    def test_leading_dimensions(self, lead, absorb):
        call = make(lead)
        expected = truth(call)
        assert expected[0].shape == (*lead, H, L, DV)
        testing.assert_close(attend(call, absorb=absorb), expected)
        testing.assert_close(attend(in_rows(call), absorb=absorb), expected)

    @both_ways
    @pytest.mark.parametrize("sizes", [
        {"L": 0}, {"S": 0}, {"R": 0}, {"N": 0}, {"C": 0}, {"Dv": 0}, {"H": 1}, {"L": 1, "S": 1},
    ], ids=str)  # fmt: skip
    def test_sizes(self, sizes, absorb):
        call = make(**sizes, grad=True)
        found, expected = attend(call, absorb=absorb), truth(call)
        testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss_of(x), [*call.values()]) for x in (found, expected)]
        testing.assert_close(*gradients)
        if sizes == {"S": 0}:
            assert (found[0] == 0).all() and (found[1] == -INF).all()

    @both_ways
    def test_strides(self, absorb):
        call = make()
        expected = truth(call)
        for name in NAMES:
            laid = call | {name: torch.stack([call[name].mT, call[name].mT], -1)[..., 0].mT}
            testing.assert_close(attend(laid, absorb=absorb), expected)

    @both_ways
    def test_score_mod(self, absorb):
        call, table = make(), torch.randn(H, S, dtype=torch.float64, requires_grad=True)
        found = attend(call, score_mod=lambda s, b, h, q, k: s + table[h, k], absorb=absorb)
        expected = truth(call, bias=table[:, None])
        testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss_of(x), table) for x in (found, expected)]
        testing.assert_close(*gradients)

    def test_example(self):
        assert_example_runs(qkv.latent_attention)


class TestWhichWay:
    """The one that multiplies less, of which torch counts every product."""

    def flops(self, absorb, **sizes):
        call = {n: x.to("meta") for n, x in make(**sizes).items()}
        with FlopCounterMode(display=False) as mode:
            attend(call, absorb=absorb)
        return mode.get_total_flops()

    def test_few_queries_absorb_and_as_many_as_keys_expand(self):
        deepseek = {"H": 16, "N": 128, "R": 64, "C": 512, "Dv": 128}
        cases = [(1, 1000, True), (4, 4000, True), (1000, 1000, False), (1, 1, False)]
        for queries, keys, absorb in cases:
            sizes = deepseek | {"L": queries, "S": keys}
            assert self.flops(None, **sizes) == self.flops(absorb, **sizes)
        a, e = (self.flops(x, **deepseek, L=1, S=1000) for x in WAYS.values())
        assert a < e / 10

    def test_fewest_products(self):
        grid = itertools.product((1, 3, 17), (2, 17, 300), (4, 24), (0, 8), (4, 64), (4, 16))
        taken = set()
        for queries, keys, n, r, c, dv in grid:
            sizes = {"L": queries, "S": keys, "N": n, "R": r, "C": c, "Dv": dv}
            chosen, *both = (self.flops(x, **sizes) for x in (None, True, False))
            pairs, weights = queries * keys, c * (n + dv)
            products = [
                pairs * (2 * c + r) + queries * weights, pairs * (n + r + dv) + keys * weights
            ]  # fmt: skip
            assert both == [2 * 2 * H * x for x in products]
            assert chosen == min(both)
            taken.add(both[0] < both[1])
        assert taken == {True, False}


class TestDerivatives:
    @both_ways
    @pytest.mark.parametrize("apart", [True, False], ids=["apart", "rows"])
    def test_gradcheck(self, apart, absorb):
        call = make((), H=2, L=2, S=3, N=2, R=1, C=3, Dv=2)
        call = {n: x for n, x in (call if apart else in_rows(call)).items() if x is not None}

        def f(*tensors):
            given = {"rope_keys": None} | dict(zip(call, tensors, strict=True))
            return attend(given, softcap=2.0, absorb=absorb)

        leaves = [x.requires_grad_() for x in call.values()]
        assert gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(f, leaves, check_fwd_over_rev=True)

    @both_ways
    def test_checkpoint(self, absorb):
        call = make(grad=True)
        f = lambda *x: attend(dict(zip(NAMES, x, strict=True)), absorb=absorb)  # noqa: E731
        leaves = [*call.values()]
        found = torch.autograd.grad(loss_of(checkpoint(f, *leaves, use_reentrant=False)), leaves)
        expected = torch.autograd.grad(loss_of(f(*leaves)), leaves)
        assert all(map(torch.equal, found, expected))


class TestVmap:
    @both_ways
    @pytest.mark.parametrize("batched", [
        NAMES, *([n] for n in NAMES), NAMES[:4], NAMES[4:],
    ], ids="+".join)  # fmt: skip
    def test_samples(self, batched, absorb):
        call = make()
        samples = {n: torch.stack([call[n], call[n].sin(), 2 * call[n]], 1) for n in batched}
        f = lambda some: attend(call | some, absorb=absorb)  # noqa: E731
        found = torch.vmap(f, in_dims=(dict.fromkeys(batched, 1),))(samples)
        expected = [f({n: x[:, i] for n, x in samples.items()}) for i in range(3)]
        expected = [torch.stack(x) for x in zip(*expected, strict=True)]
        testing.assert_close(found, expected)

    @both_ways
    def test_a_gradient_for_each_sample(self, absorb):
        """Of weights that all samples share, as in differential privacy."""
        call = make((4,))
        weights = {n: call[n] for n in NAMES[4:]}
        tensors = {n: call[n] for n in NAMES[:4]}
        loss = lambda w, x: loss_of(attend(x | w, absorb=absorb))  # noqa: E731
        grad = torch.func.grad(loss)
        found = torch.vmap(grad, in_dims=(None, 0))(weights, tensors)
        for b in range(4):
            expected = grad(weights, {n: x[b] for n, x in tensors.items()})
            testing.assert_close({n: x[b] for n, x in found.items()}, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("nothing_compiled")
class TestPrograms:
    def both(self, f, g, call):
        found, expected = (x(call) for x in (f, g))
        testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss_of(x), [*call.values()]) for x in (found, expected)]
        testing.assert_close(*gradients)

    @pytest.mark.parametrize("backend", COMPILERS)
    def test_gradients_of_compiled(self, backend):
        f = lambda x: attend(x, softcap=2.0)  # noqa: E731
        self.both(torch.compile(f, backend=backend, fullgraph=True), f, make(grad=True))

    def graphs(self, f, *sizes):
        """How many there are after each call."""
        counter, counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
        compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
        for queries, keys in sizes:
            call = make(L=queries, S=keys, N=12, Dv=12)
            testing.assert_close(compiled(call), f(call))
            counts.append(counter.frame_count)
        return counts

    @pytest.mark.one_in(2)
    @both_ways
    def test_one_graph_for_all_sizes(self, absorb):
        f = lambda x: attend(x, window_size=(-1, 0), absorb=absorb)  # noqa: E731
        assert len({*self.graphs(f, (5, 9), (11, 6))}) == 1

    def test_a_graph_for_each_way(self):
        """When the shapes decide: a prompt and steps of decoding."""
        prompt, step, next_step, again = self.graphs(attend, (20, 20), (2, 31), (2, 33), (25, 25))
        assert prompt < step == next_step == again

    @both_ways
    def test_export(self, absorb):
        class Model(torch.nn.Module):
            def forward(self, call):
                return attend(call, absorb=absorb)

        call, more = make(), make(S=14)
        length = torch.export.Dim("length", min=2, max=100)
        dims = {n: {2: length} if n in ("latents", "rope_keys") else {} for n in NAMES}
        program = torch.export.export(Model(), (call,), dynamic_shapes=(dims,)).module()
        for x in (call, more):
            testing.assert_close(program(x), attend(x, absorb=absorb))

    @both_ways
    @dtypes_of("f64", "bf16")
    def test_meta_and_fake_tensors(self, dtype, absorb):
        call = make(dtype=dtype)
        expected = attend(call, absorb=absorb)
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(x) for n, x in call.items()}
        for other in (fake, {n: x.to("meta") for n, x in call.items()}):
            for x, real in zip(attend(other, absorb=absorb), expected, strict=True):
                assert (x.shape, x.dtype) == (real.shape, real.dtype)


class TestAutocast:
    @both_ways
    @pytest.mark.parametrize(
        "kept", [NAMES, NAMES[4:], NAMES[:2], ()], ids=["all", "weights", "queries", "none"]
    )
    def test_casts_all_tensors(self, kept, absorb):
        """Those that are kept in float32 are cast as torch's own projections cast them."""
        call = make(dtype=torch.float32)
        half = {n: x.bfloat16() for n, x in call.items()}
        expected = attend(half, absorb=absorb)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = attend(half | {n: call[n] for n in kept}, absorb=absorb)
        assert all(map(torch.equal, found, expected))

    def test_float64_stays(self):
        call = make()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            testing.assert_close(attend(call), truth(call))


F = make(dtype=torch.float32)
BAD = {
    "query_nope": [
        (F["query_nope"][0, 0], r"query_nope has the shape \[5, 6\], but at least 3 dim"),
        (F["query_nope"][..., :5], r"key_weight has the shape \[3, 6, 8\], but .*= \[3, 5, 8\]"),
        (F["query_nope"][:, :2], r"query_rope has .*\[2, 3, 5, 4\], but .*= \[2, 2, 5, 4\]"),
        (F["query_nope"].double(), "query_rope is float32, but query_nope is float64"),
        (F["query_nope"].int(), "query_nope is int32"),
    ],
    "query_rope": [
        (F["query_rope"][0], r"query_rope has the shape \[3, 5, 4\], but .*= \[2, 3, 5, 4\]"),
        (F["query_rope"][:, :, :4], r"query_rope has .*\[2, 3, 4, 4\], but .*= \[2, 3, 5, 4\]"),
        (F["query_rope"][..., :3], r"rope_keys has .*\[2, 1, 9, 4\], but .*= \[2, 1, 9, 3\]"),
        (F["query_rope"].half(), "query_rope is float16, but query_nope is float32"),
    ],
    "latents": [
        (F["latents"][0], r"latents has the shape \[1, 9, 8\], but 4 dim.*\[..., 1, S, C\]"),
        (F["latents"].expand(-1, 3, -1, -1), r"latents has .*\[2, 3, 9, 8\].*= \[2, 1, 9, 8\]"),
        (F["latents"][..., :7], r"latents has .*\[2, 1, 9, 7\], but .*= \[2, 1, 9, 8\]"),
        (F["latents"][:1], r"latents has .*\[1, 1, 9, 8\], but .*= \[2, 1, 9, 8\]"),
        (F["latents"].double(), "latents is float64, but query_nope is float32"),
        (F["latents"].to("meta"), "latents is on meta"),
        (F["latents"].to_sparse(), "latents has the layout Sparse"),
    ],
    "rope_keys": [
        (None, r"latents has .*\[2, 1, 9, 8\], but .*C \+ R\] = \[2, 1, 9, 12\]"),
        (F["rope_keys"][..., :3], r"rope_keys has .*\[2, 1, 9, 3\], but .*= \[2, 1, 9, 4\]"),
        (F["rope_keys"][:, :, 1:], r"rope_keys has .*\[2, 1, 8, 4\], but .*= \[2, 1, 9, 4\]"),
        (F["rope_keys"][0], r"rope_keys has the shape \[1, 9, 4\]"),
        (F["rope_keys"].bfloat16(), "rope_keys is bfloat16, but query_nope is float32"),
    ],
    "key_weight": [
        (F["key_weight"][0], r"key_weight has the shape \[6, 8\], but 3 dim.*\[H, N, C\]"),
        (F["key_weight"][:2], r"key_weight has .*\[2, 6, 8\], but .*= \[3, 6, 8\]"),
        (F["key_weight"][..., :7], r"value_weight has .*\[3, 7, 8\], but .*= \[3, 7, 7\]"),
        (F["key_weight"].double(), "key_weight is float64, but query_nope is float32"),
    ],
    "value_weight": [
        (F["value_weight"][0], r"value_weight has the shape \[7, 8\], but 3 dim.*\[H, Dv, C\]"),
        (F["value_weight"].mT, r"value_weight has .*\[3, 8, 7\], but .*= \[3, 8, 8\]"),
        (F["value_weight"][:1], r"value_weight has .*\[1, 7, 8\], but .*= \[3, 7, 8\]"),
        (F["value_weight"].half(), "value_weight is float16, but query_nope is float32"),
    ],
    "attn_mask": [(torch.ones(L, S + 1), r"attn_mask has the shape \[5, 10\]")],
    "sinks": [(torch.ones(H + 1), r"sinks has the shape \[4\]")],
    "dropout_p": [(1.5, "dropout_p is 1.5")],
    "window_size": [((-2, 0), r"window_size is \(-2, 0\)")],
    "softcap": [(-1.0, "softcap is -1")],
    "score_mod": [("no function", "score_mod is 'no function'")],
}  # fmt: skip


@both_ways
@pytest.mark.parametrize("name, value, message", [
    (name, value, message) for name, cases in BAD.items() for value, message in cases
])  # fmt: skip
def test_bad_call(name, value, message, absorb):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        qkv.latent_attention(**F | {name: value}, absorb=absorb)
