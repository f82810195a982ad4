"""qkv.integrations.vllm, on an imitation of vLLM (fake_vllm.py), against softmax(q k) v of each
request on its own."""

import importlib
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import pytest
import torch
from common import HALVES, INF

from qkv.integrations import vllm as integration

H, HKV, D = 4, 2, 24


@pytest.fixture
def backend(monkeypatch):
    fake_vllm.install(monkeypatch)
    name = f"{integration.__name__}._backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def reference(query, key, value, window=None, causal=True, softcap=0.0, slopes=None, sinks=None):
    """Of one request, in float64: `[L, H, D]` for `[S, Hkv, D]`."""
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(H // HKV, 0) for x in (key, value))
    L, S = query.size(1), key.size(1)
    ahead = torch.arange(S) - torch.arange(S - L, S)[:, None]  # of the query
    scores = query @ key.mT * 0.3
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    if slopes is not None:
        scores = scores + slopes[:, None, None].double() * ahead
    scores = scores.masked_fill(ahead > 0, -INF) if causal else scores
    if window is not None:
        scores = scores.masked_fill(ahead.abs() >= window, -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, L, 1)], -1)
    return (scores.softmax(-1)[..., :S] @ value).transpose(0, 1)


class Requests:
    """The tokens of each request so far, and the engine that serves them."""

    def __init__(self, backend, dtype=torch.float32, options=None):
        layer = backend.Attention(H, D, 0.3, HKV, **(options or {}))
        self.engine = fake_vllm.Engine(backend.Backend, layer, dtype, HKV, D)
        self.dtype, self.seen = dtype, {}

    def new(self, counts):
        return [
            torch.cat([torch.randn(n, heads, D) for n in counts.values()]).to(self.dtype)
            for heads in (H, HKV, HKV)
        ]

    def check(self, counts, tolerance=1e-5, **expected):
        tensors = self.new(counts)
        output = self.engine.step(counts, *tensors)
        parts = [x.split(list(counts.values())) for x in (output, *tensors)]
        for name, found, query, *rows in zip(counts, *parts, strict=True):
            before = self.seen.get(name, [x[:0] for x in rows])
            self.seen[name] = [torch.cat(pair) for pair in zip(before, rows, strict=True)]
            wanted = reference(query, *self.seen[name], **expected)
            torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_prompts_steps_and_both_in_one_batch(backend, dtype):
    torch.manual_seed(0)
    requests = Requests(backend, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for counts in (
        {"a": 9, "b": 1, "c": 5},  # prompts
        {"a": 1, "b": 1, "c": 1},  # steps
        {"c": 1, "d": 11, "a": 1, "e": 3},  # both, in another order
        {"d": 6, "e": 1},  # the second part of a prompt beside a step
        {"a": 4},  # drafts
    ):
        requests.check(counts, tolerance)


def test_requests_with_a_prefix_in_the_same_pages(backend):
    torch.manual_seed(0)
    requests = Requests(backend)
    requests.check({"a": 10})
    requests.engine.share("b", "a", 8)
    requests.seen["b"] = [x[:8] for x in requests.seen["a"]]
    requests.check({"a": 1, "b": 5})
    assert requests.engine.tables["b"][:2] == requests.engine.tables["a"][:2]
    requests.check({"a": 1, "b": 1})


SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([0.3, -1.0, 2.0, 0.0])
OPTIONS = [
    ({"sliding_window": 3}, {"window": 3}),
    ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    ({"alibi_slopes": SLOPES.tolist()}, {"slopes": SLOPES}),
    ({"sinks": SINKS}, {"sinks": SINKS}),
    ({"sinks": SINKS, "sliding_window": 5, "logits_soft_cap": 1.0},
     {"sinks": SINKS, "window": 5, "softcap": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_options(backend, options, expected):
    torch.manual_seed(0)
    requests = Requests(backend, options=options)
    requests.check({"a": 9, "b": 4}, **expected)
    requests.check({"a": 1, "b": 2, "c": 3}, **expected)


def test_slopes_are_not_rounded_to_the_dtype_of_the_model(backend):
    """Which vLLM makes torch's default while it makes the model."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = backend.Attention(H, D, 0.3, HKV, alibi_slopes=SLOPES.tolist())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(layer.alibi_slopes, SLOPES)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("options, expected", [({}, {}), *OPTIONS[:2], *OPTIONS[3:]])
def test_encoders(backend, attn_type, options, expected):
    torch.manual_seed(0)
    options = options | {"attn_type": fake_vllm.AttentionType(attn_type)}
    requests = Requests(backend, options=options)
    requests.check({"a": 9, "b": 4, "c": 1}, causal=False, **expected)
    assert requests.engine.cache.isnan().all()


def test_cross_attention(backend):
    """Keys come once, from the encoder; steps after that have none."""
    torch.manual_seed(0)
    cross = fake_vllm.AttentionType.ENCODER_DECODER
    layer = backend.Attention(H, D, 0.3, HKV, attn_type=cross)
    engine = fake_vllm.Engine(backend.Backend, layer, torch.float32, HKV, D)
    encoded = engine.batch({"a": 7, "b": 3})
    key, value = torch.randn(2, 10, HKV, D)
    layer.do_kv_cache_update(None, key, value, engine.cache, encoded.slot_mapping)
    for counts in ([4, 2], [1, 1]):
        begins = torch.tensor([0, *counts]).cumsum(0).int()
        batch = encoded.replace(query_start_loc=begins, num_actual_tokens=sum(counts))
        metadata = engine.builder.build(0, batch)
        assert metadata.causal  # of the decoder, not of its attention to the encoder
        query = torch.randn(sum(counts), H, D)
        found = layer.forward(None, query, None, None, engine.cache, metadata, query.clone())
        pairs = ((query, counts), (key, [7, 3]), (value, [7, 3]))
        rows = zip(*(x.split(sizes) for x, sizes in pairs), strict=True)
        wanted = torch.cat([reference(*one, causal=False) for one in rows])
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_steps_of_latent_attention(backend, as_tuple):
    torch.manual_seed(0)
    latent, rotated, size, lengths = 32, 8, 16, [21, 3]
    layer = backend.LatentBackend.get_impl_cls()(H, latent + rotated, 0.2, 1, kv_lora_rank=latent)
    cache = torch.randn(5, size, latent + rotated)
    table = torch.tensor([[3, 0], [2, 77]], dtype=torch.int32)
    query = torch.randn(2, H, latent + rotated)
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32))
    given = query.split([latent, rotated], -1) if as_tuple else query
    output, lse = layer.forward_mqa(given, cache, SimpleNamespace(decode=decode), None)
    assert lse is None
    for row, length in enumerate(lengths):
        blocks = table[row, : -(-length // size)].long()
        keys = cache[blocks].flatten(0, 1)[:length]
        wanted = (query[row] @ keys.T * 0.2).softmax(-1) @ keys[:, :latent]
        torch.testing.assert_close(output[row], wanted, atol=1e-5, rtol=1e-5)


def test_before_there_is_a_batch(backend):
    layer, output = backend.Attention(H, D, 1.0), torch.ones(3, H, D)
    assert layer.forward(None, output, output, output, torch.empty(0), None, output) is output


def test_what_the_backend_says_of_itself(backend):
    assert backend.Backend.get_name() == "CPU_ATTN"  # vLLM looks the class up by it
    assert backend.Backend.get_impl_cls() is backend.Attention
    for kind in (backend.Backend, backend.LatentBackend):
        assert kind.get_supported_head_sizes() == []
    assert backend.Backend.supports_sink()
    assert backend.Backend.supports_kv_cache_dtype("auto")
    assert not backend.Backend.supports_kv_cache_dtype("fp8")
    assert not backend.Backend.forward_includes_kv_cache_update


def test_what_is_refused(backend):
    def refuses(message):
        return pytest.raises(NotImplementedError, match=f"qkv in vLLM: {message}")

    with refuses("kv_cache_dtype is fp8, but auto"):
        backend.Attention(H, D, 1.0, kv_cache_dtype="fp8")
    encoder = fake_vllm.AttentionType.ENCODER_ONLY
    with refuses("alibi_slopes is given, but None"):
        backend.Attention(H, D, 1.0, alibi_slopes=[1.0] * H, attn_type=encoder)
    requests = Requests(backend)
    batch = requests.engine.batch({"a": 3})
    with refuses("causal is one for each request"):
        requests.engine.builder.build(0, batch.replace(causal=torch.tensor([True])))
    x = torch.zeros(3, H, D)
    with refuses("output_scale is given"):
        requests.engine.layer.forward(None, x, x, x, x, batch, x, torch.ones(1))
    with refuses(r"kv_cache is \[2, 2, 4, 24\], but a last dimension of 48"):
        requests.engine.layer.forward(None, x, x, x, torch.zeros(2, 2, 4, 24), batch, x)


def test_registration(monkeypatch):
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(integration, "version_of", lambda name: "0.33.1+cpu")
    group, name = "vllm.general_plugins", "qkv"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [value] = re.findall(rf'"{group}"\]\n{name} = "(.+)"', project)
    plugin = EntryPoint(name, value, group).load()
    for named in (None, "", "other"):
        if named is not None:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        plugin()
        assert not fake_vllm.OVERRIDES
    monkeypatch.setenv("VLLM_PLUGINS", "other,qkv")
    plugin()
    for member, name in {"CPU_ATTN": "Backend", "CPU_MLA": "LatentBackend"}.items():
        path = fake_vllm.AttentionBackendEnum[member].get_path()
        assert path == f"qkv.integrations.vllm._backend.{name}"


@pytest.mark.parametrize("found", ["0.32.0", "0.34.1+cpu", None])
def test_another_version(monkeypatch, found):
    if found is not None:
        monkeypatch.setattr(integration, "version_of", lambda name: found)
    message = f"for vLLM 0.33, but {found or 'none'} is installed"
    with pytest.raises(ImportError, match=re.escape(message)):
        integration.register()
