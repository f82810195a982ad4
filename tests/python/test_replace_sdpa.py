"""qkv.replace_sdpa: what it takes, what it leaves to torch, and that nothing is left behind."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from common import run_python
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.utils._python_dispatch import TorchDispatchMode

import qkv
from qkv import _replace, _replace_varlen
from qkv.version import __version__

REPLACED = (
    "aten::scaled_dot_product_attention",
    "aten::_native_multi_head_attention",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
)
SDPA, MULTI_HEAD = "scaled_dot_product_attention", "_native_multi_head_attention"


def kernels() -> list[str]:
    """All that torch's dispatcher has on the functions that are replaced."""
    return [
        torch._C._dispatch_dump(name) + torch._C._dispatch_dump_table(name) for name in REPLACED
    ]


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 8) for n in (16, 20, 20)]


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    return [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5)]


@pytest.fixture
def replaced():
    with qkv.replace_sdpa() as handle:
        yield handle
    assert "qkv" not in torch.compiler.config.cache_key_tag


def counts() -> tuple[int, int]:
    report = qkv.sdpa_report()
    return sum(report.taken.values()), sum(report.left.values())


def assert_taken(call) -> None:
    before = counts()
    call()
    taken, left = counts()
    assert taken > before[0] and left == before[1], qkv.sdpa_report()


class TestSwitch:
    def test_is_undone_exactly(self, tensors):
        before = kernels()
        handle = qkv.replace_sdpa()
        assert kernels() != before
        handle.undo()
        assert kernels() == before
        handle.undo()  # nothing more
        with pytest.raises(ValueError, match="of the block"), qkv.replace_sdpa():
            raise ValueError("of the block")
        assert kernels() == before
        with Operators() as operators:
            F.scaled_dot_product_attention(*tensors)
        assert not any("qkv" in name for name in operators.names)

    def test_nests_and_overlaps(self):
        before = kernels()
        first, second = qkv.replace_sdpa(), qkv.replace_sdpa()
        during = kernels()
        with qkv.replace_sdpa():
            assert kernels() == during
        first.undo()
        assert kernels() == during
        second.undo()
        assert kernels() == before

    def test_stays_without_its_handle(self):
        before = kernels()
        qkv.replace_sdpa()
        assert kernels() != before
        _replace._changed(torch.ops.qkv._restore_sdpa())
        assert kernels() == before
        with pytest.raises(RuntimeError, match="nothing is replaced"):
            torch.ops.qkv._restore_sdpa()

    def test_is_for_all_threads(self, tensors, replaced):
        def calls():
            for _ in range(50):
                with qkv.replace_sdpa():
                    F.scaled_dot_product_attention(*tensors)

        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert qkv.sdpa_report().taken == {SDPA: 200}

    def test_torch_registry(self, tensors):
        attention = torch.nn.attention
        before = kernels()
        assert "qkv" in attention.list_flash_attention_impls()
        assert attention.current_flash_attention_impl() is None
        attention.activate_flash_attention_impl("qkv")
        try:
            assert_taken(lambda: F.scaled_dot_product_attention(*tensors))
        finally:
            attention.restore_flash_attention_impl()
        assert kernels() == before

    def test_report(self, tensors):
        with qkv.replace_sdpa():
            assert str(qkv.sdpa_report()) == "no calls"
            F.scaled_dot_product_attention(*tensors)
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(*tensors)
        assert str(qkv.sdpa_report()) == (
            "1  scaled_dot_product_attention  qkv\n"
            "1  scaled_dot_product_attention  torch: flash attention is switched off, by "
            "sdpa_kernel() say"
        )


@torch.jit.script
def scripted(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class TestTaken:
    """Each way of calling it gives what qkv.attention gives, to the bit."""

    @pytest.mark.parametrize(
        "context",
        [torch.enable_grad, torch.no_grad, torch.inference_mode, Operators],
        ids=lambda context: context.__name__,
    )
    def test_contexts(self, tensors, replaced, context):
        expected = qkv.attention(*tensors)
        with context():
            assert_taken(
                lambda: torch.testing.assert_close(
                    F.scaled_dot_product_attention(*tensors), expected, rtol=0, atol=0
                )
            )

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtypes(self, tensors, replaced, dtype):
        x = [t.to(dtype) for t in tensors]
        assert_taken(lambda: F.scaled_dot_product_attention(*x))

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
    def test_ranks(self, replaced, shape):
        q, k, v = (torch.randn(*shape, *rows) for rows in ((4, 8), (5, 8), (5, 6)))
        assert_taken(lambda: F.scaled_dot_product_attention(q, k, v))

    def test_options(self, tensors, replaced):
        q, k, v = tensors
        with_gradient = torch.randn(4, 16, 20, requires_grad=True)
        for options in (
            {"is_causal": True},
            {"dropout_p": 0.5},
            {"attn_mask": torch.rand(16, 20) > 0.3},
            {"attn_mask": with_gradient},
            {"attn_mask": with_gradient, "dropout_p": 0.3, "scale": 0.1},
            {"attn_mask": torch.rand(16, 20) > 0.3, "is_causal": True},
        ):
            torch.manual_seed(1)
            expected = qkv.attention(q, k, v, **options)
            torch.manual_seed(1)
            found = F.scaled_dot_product_attention(q, k, v, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        found.sum().backward() if found.requires_grad else None
        assert_taken(lambda: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))

    @pytest.mark.bf16
    def test_autocast(self, tensors, replaced):
        with torch.autocast("cpu", torch.bfloat16):
            assert_taken(lambda: F.scaled_dot_product_attention(*tensors))
            assert F.scaled_dot_product_attention(*tensors).dtype == torch.bfloat16

    def test_torchscript(self, tensors, replaced):
        assert_taken(lambda: scripted(*tensors))

    def test_vmap(self, tensors, replaced):
        q, k, v = tensors
        vmap = torch.func.vmap(F.scaled_dot_product_attention, (0, None, 0))
        assert_taken(lambda: vmap(q, k[0], v))
        expected = torch.stack([qkv.attention(q[i], k[0], v[i]) for i in range(2)])
        torch.testing.assert_close(vmap(q, k[0], v), expected)

    @pytest.mark.parametrize("randomness", ["error", "same", "different"])
    def test_vmap_of_dropout(self, tensors, replaced, randomness):
        q = tensors[0].new_zeros(3, 16, 8)
        v = torch.eye(8).expand(3, 8, 8)  # shows the weights

        def attention(q, v):
            return F.scaled_dot_product_attention(q, q[:8], v, dropout_p=0.5)

        vmap = torch.func.vmap(attention, randomness=randomness)
        if randomness == "error":
            with pytest.raises(RuntimeError, match="randomness"):
                vmap(q, v)
        else:
            kept = vmap(q, v)
            assert (kept[0] == kept[1]).all() == (randomness == "same")

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("inference", [False, True])
    def test_compile(self, tensors, replaced, grad, inference):
        torch.compiler.reset()
        function = torch.compile(
            lambda *x: F.scaled_dot_product_attention(*x), backend="aot_eager", fullgraph=True
        )
        x = [t.clone().requires_grad_(grad) for t in tensors]
        with torch.inference_mode(inference):
            assert_taken(lambda: function(*x))  # when it is compiled
            found = function(*x)
            torch.testing.assert_close(found, qkv.attention(*tensors), rtol=0, atol=0)
        if grad and not inference:
            # Contiguous, as what is compiled makes it: other strides may add in another order.
            found.backward(torch.ones_like(found))
            expected = [t.clone().requires_grad_() for t in tensors]
            qkv.attention(*expected).backward(torch.ones_like(found))
            for a, b in zip(x, expected, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)

    def test_compiled_programs_are_kept_apart(self, tensors):
        def tags():
            """Of this thread, and of another."""
            with ThreadPoolExecutor(1) as others:
                read = partial(getattr, torch.compiler.config, "cache_key_tag")
                return read(), others.submit(read).result()

        before, end = tags(), f"+qkv{__version__}"
        with qkv.replace_sdpa():
            assert tags() == tuple(x + end for x in before)
            with torch.compiler.config.patch(cache_key_tag="own"), qkv.replace_sdpa():
                assert tags()[0] == "own" + end
        assert tags() == before

    def test_torch_reads_a_tag_of_1_as_true(self):
        program = (
            "import qkv, torch; qkv.replace_sdpa(); print(torch.compiler.config.cache_key_tag)"
        )
        output = run_python(program, env={"TORCH_COMPILE_CACHE_KEY_TAG": "1"})
        assert output == f"True+qkv{__version__}\n"

    def test_export(self, tensors, replaced):
        class Model(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        program = torch.export.export(Model(), tuple(tensors)).run_decompositions()
        targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert "qkv.attention_forward.default" in targets
        torch.testing.assert_close(program.module()(*tensors), qkv.attention(*tensors))


class TestLeft:
    """The same call works as before, or fails as before."""

    @pytest.mark.parametrize(
        "why, call",
        [
            ("not on the CPU", lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta"))),
            ("not float32", lambda q, k, v: (q.cfloat(), k.cfloat(), v.cfloat())),
            ("refuses", lambda q, k, v: (q, k.double(), v)),
            ("refuses", lambda q, k, v: (q[0, 0, 0], k, v)),
            ("refuses", lambda q, k, v: (q, k[..., :3], v)),
            ("refuses", lambda q, k, v: (q, k, v, torch.zeros(3, 2, 4, 16, 20))),
            ("refuses", lambda q, k, v: (q, k, v, torch.zeros(16, 20, dtype=torch.int32))),
            ("refuses", lambda q, k, v: (q, k, v, None, 1.5)),
            ("nested", lambda *x: [torch.nested.as_nested_tensor([t[0], t[1]]) for t in x]),
        ],
    )  # fmt: skip
    def test_reasons(self, tensors, why, call):
        def outcome():
            try:
                result = F.scaled_dot_product_attention(*call(*tensors))
                return result.shape if result.is_meta else torch.nested.to_padded_tensor(result, 0)
            except RuntimeError as error:
                return str(error)

        expected = outcome()
        with qkv.replace_sdpa():
            found = outcome()
            report = qkv.sdpa_report()
        assert type(found) is type(expected)
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected
        assert not report.taken
        assert [why in reason for _, reason in report.left] == [True]

    def test_an_infinite_scale(self, tensors, replaced):
        q, k, v = tensors
        F.scaled_dot_product_attention(q, k, v, scale=float("inf"))
        assert counts() == (0, 1)

    @pytest.mark.parametrize(
        "backends, taken",
        [
            (SDPBackend.MATH, False),
            ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], False),
            ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True),
        ],
        ids=str,
    )
    def test_sdpa_kernel(self, tensors, replaced, backends, taken):
        with sdpa_kernel(backends):
            F.scaled_dot_product_attention(*tensors)
        assert counts() == ((1, 0) if taken else (0, 1))

    def test_errors_from_elsewhere_are_not_ours_to_hide(self, tensors, replaced):
        class Refuses(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                raise RuntimeError(f"no {func}")

        with Refuses(), pytest.raises(RuntimeError, match="no qkv.attention_forward"):
            F.scaled_dot_product_attention(*tensors)


MASK = torch.tensor([[1, 1, 0, 1, 0]] * 2 + [[0] * 5] + [[1, 0, 1, 1, 1]], dtype=torch.bool)
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": MASK},
    "scale": {"scale": -0.7, "dropout_p": 0.0},
    "dropout": {"dropout_p": 0.4},
}


class TestDerivatives:
    """Of first and second order, and in forward mode."""

    @pytest.fixture(autouse=True)
    def _on(self, replaced):
        pass

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
    def test_gradients_of_all_kinds(self, leaves, options):
        def attention(*x):
            torch.manual_seed(2)
            return F.scaled_dot_product_attention(*x, **options)

        assert torch.autograd.gradcheck(attention, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(attention, leaves, check_fwd_over_rev=True)

    def test_of_a_mask(self, leaves):
        mask = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        x = [*leaves, mask]
        assert torch.autograd.gradcheck(F.scaled_dot_product_attention, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(
            F.scaled_dot_product_attention, x, check_fwd_over_rev=True
        )

    def test_of_grouped_heads_and_broadcast_batches(self):
        x = [
            torch.randn(*shape, dtype=torch.float64, requires_grad=True)
            for shape in ((4, 3, 2), (1, 2, 4, 2), (2, 2, 4, 3))
        ]

        def attention(*x):
            torch.manual_seed(2)
            return F.scaled_dot_product_attention(*x, dropout_p=0.3, enable_gqa=True)

        assert torch.autograd.gradcheck(attention, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(attention, x, check_fwd_over_rev=True)

    def test_batched(self, leaves):
        assert torch.autograd.gradcheck(
            F.scaled_dot_product_attention,
            leaves,
            check_batched_grad=True,
            check_forward_ad=True,
            check_batched_forward_grad=True,
        )

    @pytest.mark.parametrize(
        "transform",
        [
            "grad(f)(x)",
            "hessian(f)(x)",
            "jacrev(jacrev(f))(x)",
            "jacrev(jacfwd(f))(x)",
            "jacfwd(jacfwd(f))(x)",
            "vjp(grad(f), x)[1](x)",
            "jvp(f, (x,), (2 * x,))",
            "jvp(grad(f), (x,), (2 * x,))",
            "grad(lambda y: grad(lambda z: grad(f)(z).sin().sum())(y).sin().sum())(x)",
            "vmap(hessian(f))(x)",
            "linearize(f, x)[1](x)",
        ],
    )
    def test_transforms(self, leaves, transform):
        x, k, v = (t.detach() for t in leaves)

        def f(q):
            keys, values = (k, v) if q.dim() == 3 else (k[0], v[0])
            return F.scaled_dot_product_attention(q, keys, values).sin().sum()

        names = {**vars(torch.func), "f": f, "x": x}
        found = eval(transform, names)
        with sdpa_kernel(SDPBackend.MATH):
            expected = eval(transform, names)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("masks", ["none", "padding", "causal"])
    def test_of_an_encoder_layer(self, masks):
        """With respect to what comes in, and to the weights of its attention."""
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, "gelu", batch_first=True).double()
        x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        options = {
            "none": {},
            "padding": {"src_key_padding_mask": torch.arange(3) >= torch.tensor([[3], [2]])},
            "causal": {"src_mask": CAUSAL[:3, :3], "is_causal": True},
        }[masks]  # fmt: skip
        name = "self_attn.in_proj_weight"

        def f(x, weight):
            return torch.func.functional_call(layer, {name: weight}, (x,), options)

        leaves = x, layer.get_parameter(name)
        assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True, fast_mode=True)
        assert qkv.sdpa_report().taken and not qkv.sdpa_report().left

    def test_second_order_costs_nothing_until_it_is_asked_for(self, leaves):
        with Operators() as operators:
            output = F.scaled_dot_product_attention(*leaves)
            gradients = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        assert not any("softmax" in name for name in operators.names)
        torch.autograd.grad(sum(g.sum() for g in gradients), leaves)


def encoder_layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options).eval()


PADDING = torch.arange(6) >= torch.tensor([6, 4, 1]).unsqueeze(1)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.bool)


class TestFastPaths:
    """Evaluation of nn.MultiheadAttention and nn.TransformerEncoderLayer."""

    @pytest.fixture
    def x(self):
        torch.manual_seed(0)
        return torch.randn(3, 6, 16)

    @staticmethod
    def check(call):
        with torch.no_grad():
            expected = call()
            with qkv.replace_sdpa():
                found = call()
        assert set(qkv.sdpa_report().taken) == {MULTI_HEAD}, qkv.sdpa_report()
        assert not qkv.sdpa_report().left
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("weights", ["none", "mean", "all"])
    @pytest.mark.parametrize(
        "masks", [{}, {"attn_mask": CAUSAL}, {"key_padding_mask": PADDING},
                  {"attn_mask": CAUSAL, "key_padding_mask": PADDING}], ids=lambda m: "+".join(m)
    )  # fmt: skip
    def test_multihead_attention(self, x, masks, weights):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        options = {"need_weights": weights != "none", "average_attn_weights": weights == "mean"}
        self.check(lambda: layer(x, x, x, **masks, **options))

    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize(
        "masks", [{}, {"src_mask": CAUSAL}, {"src_key_padding_mask": PADDING}], ids="+".join
    )
    def test_encoder_layer(self, x, masks, norm_first):
        layer = encoder_layer(norm_first=norm_first)
        self.check(lambda: layer(x, **masks))

    @pytest.mark.parametrize("nested", [False, True])
    def test_encoder(self, x, nested):
        """Padding becomes nested tensors: documents of different lengths."""
        encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=nested).eval()
        self.check(lambda: encoder(x, src_key_padding_mask=PADDING)[~PADDING])

    def test_scripted(self, x):
        layer = torch.jit.script(encoder_layer())
        self.check(lambda: layer(x))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtypes(self, x, dtype):
        layer = copy.deepcopy(encoder_layer()).to(dtype)
        y = x.to(dtype)
        with torch.no_grad():
            expected = layer(y)
            with qkv.replace_sdpa():
                found = layer(y)
        error = (found.float() - encoder_layer()(x)).abs().max()
        assert error <= 1.2 * (expected.float() - encoder_layer()(x)).abs().max() + 1e-6

    @pytest.mark.bf16
    def test_autocast(self, x, replaced):
        layer = encoder_layer()
        attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert_taken(lambda: layer(x))
            assert_taken(lambda: attention(x, x, x))

    def test_left(self, x, replaced):
        layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        nested = torch.nested.as_nested_tensor([x[0], x[1, :3]])
        with torch.no_grad():
            with sdpa_kernel(SDPBackend.MATH):
                expected = layer(x, x, x)[0]
            torch.testing.assert_close(layer(x, x, x)[0], expected)
            layer(nested, nested, nested, need_weights=True)
        reasons = {reason.split(",")[0] for _, reason in qkv.sdpa_report().left}
        assert reasons == {"flash attention is switched off", "nested tensors"}


class TestPacked:
    """torch.nn.attention.varlen, which has no kernel of torch's on CPUs."""

    ends = torch.tensor([0, 3, 7], dtype=torch.int32)

    def packed(self, dtype=torch.float64):
        torch.manual_seed(0)
        return [torch.randn(7, 2, 4, dtype=dtype, requires_grad=True) for _ in range(3)]

    def test_results_and_derivatives(self, replaced):
        rows = self.packed()
        lengths = (self.ends, self.ends, 4, 4)
        aux = AuxRequest(lse=True)
        output, lse = varlen_attn(*rows, *lengths, window_size=(-1, 0), return_aux=aux)
        expected = qkv.varlen_attn(*rows, *lengths, window_size=(-1, 0), return_aux=aux)
        assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])
        assert qkv.sdpa_report().taken == {"varlen_attn": 1}
        assert torch.autograd.gradgradcheck(lambda *x: varlen_attn(*x, *lengths), rows)
        with torch.no_grad():
            out = torch.empty_like(output)
            varlen_attn_out(out, *rows, *lengths, window_size=(-1, 0))
            assert torch.equal(out, output)

    def test_compiled(self, replaced):
        rows = self.packed()

        def attend(*rows):
            return varlen_attn(*rows, self.ends, None, 4, 4).sin()

        output = torch.compile(attend, backend="aot_eager", fullgraph=True)(*rows)
        expected = qkv.varlen_attn(*rows, self.ends, None, 4, 4).sin()
        assert torch.equal(output, expected)
        found = torch.autograd.grad(output.sum(), rows)
        for x, y in zip(found, torch.autograd.grad(expected.sum(), rows), strict=True):
            assert torch.equal(x, y)

    def test_into_a_tensor(self, replaced):
        """Has the gradients, and compiled the lse's dtype, of the function that returns it."""
        rows = self.packed()
        aux = AuxRequest(lse=True)

        def attend(out, *rows):
            return varlen_attn_out(out, *rows, self.ends, None, 4, 4, return_aux=aux)

        expected = varlen_attn(*rows, self.ends, None, 4, 4, return_aux=aux)
        found = attend(torch.empty_like(rows[0]), *rows)
        assert all(map(torch.equal, found, expected))
        gradients = (torch.autograd.grad(x[0].sum(), rows) for x in (found, expected))
        assert all(map(torch.equal, *gradients))
        fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.no_grad():
            _, lse = attend(*map(fake.from_tensor, (rows[0], *rows)))
        assert lse.dtype == torch.float64
        for out in (torch.empty(2, 7, 2, 4).double(), torch.empty(7, 2, 4)):
            with pytest.raises(RuntimeError, match=r"out is .*torch.float64, \[7, 2, 4\] is exp"):
                attend(out, *rows)

    def test_undone(self):
        with qkv.replace_sdpa(), qkv.replace_sdpa():
            varlen_attn(*self.packed(), self.ends, None, 4, 4)
        with pytest.raises(NotImplementedError):
            varlen_attn(*self.packed(), self.ends, None, 4, 4)

    def test_errors_name_the_argument(self, replaced):
        query, key, value = self.packed()
        with pytest.raises(RuntimeError, match="key"):
            varlen_attn(query, key.float(), value, self.ends, None, 4, 4)

    def test_what_another_torch_may_add(self, replaced, monkeypatch):
        monkeypatch.setattr(_replace_varlen, "_SAME", _replace_varlen._SAME - {"window_size"})
        with pytest.raises(NotImplementedError, match="window_size of this version of torch"):
            varlen_attn(*self.packed(), self.ends, None, 4, 4, window_size=(-1, 0))
