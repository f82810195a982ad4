"""Every function and layer of the package under what torch does to programs: torch.compile for all
shapes, torch.export to a file and back, torch.jit.trace, functionalization, anomaly mode."""

import io

import pytest
import torch
import torch._dynamo.testing
from common import COMPILERS

import qkv

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning", "ignore:Anomaly Detection has been enabled"
    ),
    pytest.mark.usefixtures("nothing_compiled"),
]
B, H, D = 2, 3, 8


def packed(query, key, value):
    """Each batch item is a document."""
    tensors = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    ends = [torch.arange(B + 1) * x.size(2) for x in (query, key)]
    return qkv.varlen_attn(*tensors, *ends, query.size(2), key.size(2), window_size=(-1, 0))


def cached(query, key, value):
    """Into empty caches, and without gradients, which it has not."""
    caches = [key.new_zeros(*key.shape[:2], key.size(2) + 2, D) for _ in range(2)]
    query, key, value = (x.detach() for x in (query, key, value))
    starts = torch.tensor([1, 2])
    output = qkv.attention_with_kvcache(query, *caches, key, value, cache_seqlens=starts)
    return output, *caches


def latent_of(query, key):
    """The tensors of latent attention but for its latents and rotated keys."""
    weights = torch.linspace(-1, 1, 2 * H * D * D, dtype=query.dtype).view(2, H, D, D)
    return query, query.sin(), key[:, :1], *weights


def latent(query, key, value):
    nope, rope, keys, *weights = latent_of(query, key)
    return qkv.latent_attention(nope, rope, keys, value[:, :1], *weights, absorb=True)


def latent_cached(query, key, value):
    nope, rope, keys, *weights = latent_of(query.detach(), key.detach())
    cache = key.new_zeros(B, 1, key.size(2) + 2, 2 * D)
    starts = torch.tensor([1, 2])
    output = qkv.latent_attention_with_kvcache(
        nope, rope, cache, *weights, keys, value.detach()[:, :1], cache_seqlens=starts, absorb=True
    )
    return output, cache


def merged(query, key, value):
    halves = zip(key.chunk(2, -2), value.chunk(2, -2), strict=True)
    parts = [qkv.attention(query, k, v, return_lse=True) for k, v in halves]
    return qkv.merge(*zip(*parts, strict=True))


def rotated(query, key, value):
    angles = torch.outer(torch.arange(query.size(-2)), torch.linspace(1, 0.1, D // 2))
    cos, sin = (x.to(query.dtype) for x in (angles.cos(), angles.sin()))
    keys = key[..., : query.size(-2), :]
    return qkv.rotate(query, keys, cos, sin, query_weight=value.mean((0, 1, 2)))


class Model(torch.nn.Module):
    """function(query, key, value), or function(layer, query, key, value) of [B, L, H * D]."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, query, key, value):
        if self.layer is None:
            found = self.function(query, key, value)
        else:
            heads_last = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
            found = self.function(self.layer, *heads_last)
        found = (found,) if isinstance(found, torch.Tensor) else found
        return tuple(x for x in found if x is not None)


def layer(module, call):
    return Model(call, module.double())


torch.manual_seed(0)
W = H * D
FUNCTIONS = {
    "attention": lambda q, k, v: qkv.attention(q, k, v, is_causal=True, softcap=2.0),
    "attention, with lse": lambda q, k, v: qkv.attention(
        q, k, v, bias=q.mean() * torch.ones(k.size(-2)).double(), return_lse=True
    ),
    "attention_jvp": lambda q, k, v: qkv.attention_jvp(
        q, k, v, softcap=2.0, query_tangent=q.cos(), value_tangent=v.cos()
    ),
    "attention_weights": lambda q, k, v: qkv.attention_weights(q, k, reduce="heads"),
    "attention_with_weights": lambda q, k, v: qkv.attention_with_weights(q, k, v),
    "hard_attention": lambda q, k, v: qkv.hard_attention(q, k, v, straight_through=True),
    "flex_attention": lambda q, k, v: qkv.flex_attention(
        q, k, v, lambda s, b, h, i, j: torch.where(i + 2 >= j, s.tanh() * (h + 1) + b, -torch.inf)
    ),
    "varlen_attn": packed,
    "attention_with_kvcache": cached,
    "latent_attention": latent,
    "latent_attention_with_kvcache": latent_cached,
    "merge": merged,
    "rotate": rotated,
    "MultiheadAttention": layer(
        qkv.nn.MultiheadAttention(W, H, batch_first=True), lambda m, q, k, v: m(q, k, v)
    ),
    "SelfAttention": layer(
        qkv.nn.SelfAttention(W, H, rotary=100.0, qk_norm=True), lambda m, q, k, v: m(q)
    ),
    "CrossAttention": layer(
        qkv.nn.CrossAttention(W, H, qk_norm=True, gate=True), lambda m, q, k, v: m(q, k)
    ),
    "AdditiveAttention": layer(qkv.nn.AdditiveAttention(W, W, 4), lambda m, q, k, v: m(q, k, v)),
    "GaussianSmoothing": layer(
        qkv.nn.GaussianSmoothing(2.0, trainable=True), lambda m, q, k, v: m(v)
    ),
    "SoftDictionary": layer(
        qkv.nn.SoftDictionary(torch.randn(5, W), torch.randn(5, 4)), lambda m, q, k, v: m(q)
    ),
}  # fmt: skip
FUNCTIONS = {
    name: f if isinstance(f, Model) else Model(f) for name, f in FUNCTIONS.items()
}  # fmt: skip
# What takes no tensors, or other functions' places.
OTHERS = {
    "CachedDecoder", "Conversion", "KVCache", "ReplacedFlex", "ReplacedSdpa", "Rotary",
    "SdpaReport", "Spans", "__version__", "active_half_products", "active_isa", "block_mask",
    "cmake_prefix_path", "convert", "is_reproducible", "new_cache", "nn", "replace_flex",
    "replace_sdpa", "reproducible", "sdpa_report", "set_half_products", "set_isa",
    "set_reproducible", "supported_isas",
}  # fmt: skip
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def test_every_function_is_here():
    named = {name.partition(",")[0] for name in FUNCTIONS}
    assert named == ({*qkv.__all__} | {*qkv.nn.__all__}) - OTHERS


def make(L=6, S=8, requires_grad=True):
    shapes = [(B, H, n, D) for n in (L, S, S)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=requires_grad) for s in shapes]


def results_of(function, inputs):
    """What it returns, and the gradients of the inputs and of its parameters."""
    found = function(*inputs)
    outputs = [x for x in found if x.requires_grad]
    if not outputs:
        return [*found]
    seeds = [torch.ones_like(x) for x in outputs]
    leaves = [*inputs, *(function.parameters() if isinstance(function, Model) else ())]
    return [*found, *torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)]


@pytest.mark.one_in(8)
@every_function
def test_compiled_for_all_sizes(name):
    """One graph for all of them, forward and backward."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True, dynamic=True)
    graphs = set()
    for L, S in ((6, 10), (11, 14)):
        inputs = make(L, S)
        found, expected = (results_of(f, inputs) for f in (compiled, FUNCTIONS[name]))
        torch.testing.assert_close(found, expected[: len(found)])
        graphs.add(counter.frame_count)
    assert len(graphs) == 1  # none after the first call


@pytest.mark.one_in(4)
@every_function
def test_exported_to_a_file_and_back(name):
    model = FUNCTIONS[name]
    inputs = make(requires_grad=False)
    program, file = torch.export.export(model, tuple(inputs)), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        found, expected = torch.export.load(file).module()(*inputs), model(*inputs)
    torch.testing.assert_close(found, expected)
    if "Attention" not in name and name not in ("GaussianSmoothing", "merge"):
        targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert any(target.startswith("qkv.") for target in targets)


@every_function
def test_traced(name):
    model, inputs = FUNCTIONS[name], make()
    traced = torch.jit.trace(model, tuple(make(requires_grad=False)), check_trace=False)
    found, expected = (results_of(f, inputs) for f in (traced, model))
    torch.testing.assert_close(found, expected[: len(found)])


@pytest.mark.parametrize("name", ["attention", "attention_jvp", "attention_weights"])
def test_traced_symbolically(name):
    """torch.fx hands on proxies, whose every attribute is another one, which has no truth."""
    function, inputs = FUNCTIONS[name].function, make(requires_grad=False)
    graph = torch.fx.symbolic_trace(function)
    torch.testing.assert_close(graph(*inputs), function(*inputs))


def test_spans_traced_symbolically():
    """What is given for them is known when the graph runs: Spans, their tensor, or none."""
    graph = torch.fx.symbolic_trace(lambda x, spans: qkv.attention(x, x, x, spans=spans))
    x, spans = torch.randn(B, H, 6, D), qkv.Spans.window(6, 1, 1)
    for given in (spans, spans.tensor, None):
        torch.testing.assert_close(graph(x, given), qkv.attention(x, x, x, spans=given))


@every_function
def test_functionalized(name):
    f, inputs = FUNCTIONS[name], make(requires_grad=False)
    if name.endswith("attention_with_kvcache"):
        # torch.func.functionalize refuses what writes to its arguments; torch.compile, which
        # functionalizes in another way, does not: test_kvcache.py.
        with pytest.raises(RuntimeError, match="non-ATen. operator whose output has alias annot"):
            torch.func.functionalize(f)(*inputs)
        return
    torch.testing.assert_close(torch.func.functionalize(f)(*inputs), f(*inputs))


def test_anomaly_mode_names_the_backward_pass():
    query, key, value = make()
    with torch.no_grad():
        value[0, 0, 0, 0] = torch.nan
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="'AttentionBackward' returned nan values"),
    ):
        qkv.attention(query, key, value).sum().backward()


@every_function
def test_anomaly_mode_finds_nothing(name):
    inputs = make()
    expected = results_of(FUNCTIONS[name], inputs)
    with torch.autograd.detect_anomaly():
        torch.testing.assert_close(results_of(FUNCTIONS[name], inputs), expected)


class TestCompiledDerivatives:
    """torch.func's transforms inside of a compiled function; what torch refuses itself."""

    @pytest.fixture
    def tensors(self):
        return make(4, 5, requires_grad=False)

    def check(self, f, *args, backend="aot_eager"):
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*args), f(*args))

    def loss(self, tensors, **options):
        _, key, value = tensors
        return lambda q: qkv.attention(q, key, value, **options).sin().sum()

    @pytest.mark.one_in(4)
    @pytest.mark.parametrize("options", [
        {}, {"is_causal": True, "scale": 0.3}, {"softcap": 2.0, "window_size": (2, 1)},
        {"alibi_slopes": torch.ones(H), "sinks": torch.ones(H), "bias": torch.ones(H, 1, 5)},
    ], ids="-".join)  # fmt: skip
    @pytest.mark.parametrize("transform", [
        lambda f, x: torch.func.hessian(f)(x),
        lambda f, x: torch.func.grad(lambda q: torch.func.grad(f)(q).sin().sum())(x),
        lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),))[1],
        lambda f, x: torch.func.grad(lambda q: torch.func.jvp(f, (q,), (x.cos(),))[1])(x),
    ], ids=["hessian", "grad(grad)", "jvp(grad)", "grad(jvp)"])  # fmt: skip
    def test_second_order(self, tensors, options, transform):
        f = self.loss(tensors, **options)
        self.check(lambda x: transform(f, x), tensors[0])

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize("name, transform", [
        ("rotate", lambda f, x: torch.func.hessian(f)(x)),
        ("attention_weights", lambda f, x: torch.func.hessian(f)(x)),
        ("attention", lambda f, x: torch.func.jvp(
            lambda q: torch.func.jvp(f, (q,), (q.cos(),))[1], (x,), (x,))[1]),
    ])  # fmt: skip
    def test_tangents_out_of_torchs_operators(self, tensors, name, transform):
        """For which torch's autograd engine runs within an operator: not under Python's lock."""
        query, key, value = tensors
        function = FUNCTIONS[name].function
        first = lambda x: x if isinstance(x, torch.Tensor) else x[0]  # noqa: E731
        f = lambda q: first(function(q, key, value)).sin().sum()  # noqa: E731
        self.check(lambda x: transform(f, x), query)

    @pytest.mark.parametrize("jacobian", [torch.func.jacfwd, torch.func.jacrev])
    def test_jacobians(self, tensors, jacobian):
        query, key, value = tensors
        options = {"softcap": 2.0, "window_size": (2, 1)}
        self.check(jacobian(lambda q: qkv.attention(q, key, value, **options)), query)

    @pytest.mark.long
    @pytest.mark.parametrize("backend", COMPILERS)
    def test_tangents_and_their_gradient(self, tensors, backend):
        f = lambda *x: qkv.attention(*x)  # noqa: E731
        self.check(lambda *x: torch.func.jvp(f, x, x), *tensors, backend=backend)
        torch.compiler.reset()
        loss = lambda *x: torch.func.jvp(f, x, x)[1].sin().sum()  # noqa: E731
        self.check(torch.func.grad(loss, (0, 1, 2)), *tensors, backend=backend)

    def test_tangents_of_every_function(self, tensors):
        for name in ("attention, with lse", "attention_weights", "merge"):
            self.check(lambda *x, f=FUNCTIONS[name]: torch.func.jvp(f, x, x)[1], *tensors)
            torch.compiler.reset()

    def test_a_loss_of_gradients(self, tensors, monkeypatch):
        """As forces are trained: the gradient of one argument, inside, is part of the loss."""
        monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
        query, key, value = tensors
        weight = torch.randn(D, dtype=torch.float64, requires_grad=True)

        def loss(query, weight):
            energy = qkv.attention(query * weight, key, value).sin().sum()
            (force,) = torch.autograd.grad(energy, query, create_graph=True)
            return force.square().sum()

        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        found, expected = (
            torch.autograd.grad(f(query.clone().requires_grad_(), weight), weight)
            for f in (compiled, loss)
        )
        torch.testing.assert_close(found, expected)

    @pytest.mark.long
    def test_compiled_autograd(self):
        """The backward pass of such a loss, compiled while it runs."""
        leaves = make(4, 5)
        bias = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        energy = qkv.attention(*leaves, bias=bias, softcap=2.0).sin().sum()
        leaves.append(bias)
        forces = torch.autograd.grad(energy, leaves, create_graph=True)
        loss = sum(force.sin().sum() for force in forces)
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        torch.testing.assert_close([x.grad for x in leaves], [*expected])

    def test_torch_refuses_a_second_backward_pass(self, tensors):
        """Of what AOTAutograd has compiled: the gradient has to be taken inside, as above."""
        query = tensors[0].requires_grad_()
        compiled = torch.compile(self.loss(tensors), backend="aot_eager", fullgraph=True)
        (g,) = torch.autograd.grad(compiled(query), query, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            g.sum().backward()
