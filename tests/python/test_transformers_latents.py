"""transformers' models with latent attention: that latents stay unexpanded, where they do not, the
cache for them, and the keys that an indexer chose. That all of these models are right, their
losses, gradients and generated tokens, is among the tests of test_transformers.py."""

import copy

import pytest
import torch
from latent_models import CHOOSING, MODELS
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

import qkv.integrations.transformers  # noqa: E402

qkv.integrations.transformers.register()

from test_transformers import (  # noqa: E402
    TOKENS,
    both,
    inputs,
    make,
    mask_functions,
    padded,
    qkv_heads,
    seen,
)

from qkv.integrations.transformers import (  # noqa: E402
    LatentCache,
    StaticLatentCache,
    _attention,
    _latents,
    _masks,
)


@pytest.fixture
def expanded(monkeypatch):
    """The layers, by name, that have made keys and values of latents, in order."""
    names, forward = [], torch.nn.Linear.forward

    def recorded(self, x):
        names.append(getattr(self, "name", None))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", recorded)
    return names


def latent_attentions(model):
    """The modules with latent attention, whose `kv_b_proj` get names by which they are told."""
    found = [x for x in model.modules() if hasattr(x, "expand_kv")]
    for i, module in enumerate(found):
        module.kv_b_proj.name = i
    return found


def expansions(names, call):
    """How often `kv_b_proj` is called."""
    names.clear()
    call()
    return sum(name is not None for name in names)


def step(model, tokens, cache=None, parts=2):
    """The logits of tokens that come in so many parts, of which all but the first need a cache."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    logits = [model(part, past_key_values=cache).logits for part in tokens.tensor_split(parts, 1)]
    return torch.cat(logits, 1)


def step_and_gradients(model, tokens, cache=None, parts=2):
    model.zero_grad()
    logits = step(model, tokens, cache, parts)
    logits.square().mean().backward()
    return logits, [p.grad for p in model.parameters() if p.grad is not None]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_latents_stay_unexpanded(expanded, name):
    """After the prompt, as long as the config says so and nobody asks for weights."""
    model, call = make(name), inputs(name, left=True)
    del call["labels"]
    count = len(latent_attentions(model))

    def generate(**more):
        return expansions(expanded, lambda: model.generate(**call, max_new_tokens=4, **more))

    assert generate() == 4 * count > 0
    model.set_attn_implementation("qkv")
    assert generate() == count
    assert generate(output_attentions=True, return_dict_in_generate=True) == 4 * count
    model.set_attn_implementation("eager")
    assert generate() == 4 * count


def test_converted_linear_layers_leave_latents_unexpanded(onednn):
    model = make("deepseek_v3")
    assert "model.layers.0.self_attn.kv_b_proj" in qkv.convert(model, linear=True).changed
    for module in latent_attentions(model):
        assert not _latents._why_expanded(module.kv_b_proj, module.kv_b_proj.weight)


def test_undone(expanded):
    """What `qkv.convert` changes is what it was afterwards."""
    model, tokens = make("deepseek_v3"), torch.randint(2, 61, (2, TOKENS))
    latent_attentions(model)
    expected = step(model, tokens)
    conversion = qkv.convert(model)
    assert expansions(expanded, lambda: step(model, tokens)) == 2
    conversion.undo()
    assert expansions(expanded, lambda: step(model, tokens)) == 4
    assert torch.equal(step(model, tokens), expected)


class Wrapped(torch.nn.Module):
    """A layer of another library around a layer, such as an adapter or one that is quantised."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.added = torch.nn.Parameter(0.1 * torch.randn_like(layer.weight))

    def forward(self, x):
        return self.layer(x) + x @ self.added.mT


class Compressed(torch.Tensor):
    """A weight that is not numbers in memory."""


def hooked(layer):
    layer.register_forward_hook(lambda module, x, output: 2 * output)
    return layer


def offloaded(layer):
    """Has a method of its own, as where weights are elsewhere until they are needed."""
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)
    return layer


def with_bias(layer):
    other = torch.nn.Linear(layer.in_features, layer.out_features)
    torch.nn.init.normal_(other.bias)
    return other


def compressed(layer):
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Compressed), False)
    return layer


def parametrized(layer):
    return torch.nn.utils.parametrizations.weight_norm(layer)


@pytest.mark.parametrize("change, why", [
    (Wrapped, f"is a Wrapped of {__name__}"), (hooked, "has hooks"), (offloaded, "has hooks"),
    (with_bias, "has a bias"), (compressed, "has a weight that is a Compressed"),
    (parametrized, "is a ParametrizedLinear of torch.nn.utils.parametrize"),
])  # fmt: skip
def test_other_layers_are_called(monkeypatch, change, why):
    """More may happen there than the product with a weight; that is said once."""
    said = []
    monkeypatch.setattr(_latents._logger, "warning_once", said.append)
    model, tokens = make("deepseek_v2"), torch.randint(2, 61, (2, TOKENS))
    module = latent_attentions(model)[0]
    module.kv_b_proj = change(module.kv_b_proj)
    expected, found = both(model, lambda model: step_and_gradients(model, tokens))
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    [said] = set(said)
    assert f"kv_b_proj of DeepseekV2Attention {why};" in said


def test_hooks_of_all_modules_are_called():
    """torch has them for every module, and so for kv_b_proj."""
    model, tokens = make("deepseek_v2"), torch.randint(2, 61, (2, TOKENS))
    expanding = [x.kv_b_proj for x in latent_attentions(model)]
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, x, output: 2 * output if module in expanding else None
    )
    try:
        expected, found = both(model, lambda model: step_and_gradients(model, tokens))
    finally:
        handle.remove()
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_weight_of_another_dtype(monkeypatch):
    """It is torch that refuses the product, as without us."""
    said = []
    monkeypatch.setattr(_latents._logger, "warning_once", said.append)
    model, tokens = make("deepseek_v2"), torch.randint(2, 61, (2, TOKENS))
    latent_attentions(model)[0].kv_b_proj.double()
    for attention in ("sdpa", "qkv"):
        model.set_attn_implementation(attention)
        with pytest.raises(RuntimeError, match="same dtype"):
            step(model, tokens)
    assert "has a weight in torch.float64 on cpu for torch.float32;" in said[0]


def test_autocast_and_other_dtypes(expanded):
    """As the layers of torch cast what they are given."""
    model, tokens = make("youtu"), torch.randint(2, 61, (2, TOKENS))
    latent_attentions(model)

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, tokens)

    expected, found = both(model, run)
    assert_close(found, expected, atol=0.2, rtol=0.1)
    model.bfloat16().set_attn_implementation("qkv")
    assert expansions(expanded, lambda: step(model, tokens)) == 2


def test_what_means_something_else_stays_expanded():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    class Reversed(DeepseekV3Attention):
        def expand_kv(self, kv_nope, k_rot):
            return super().expand_kv(kv_nope.flip(2), k_rot.flip(2))

    assert _latents.expands_latents(DeepseekV3Attention)
    assert not _latents.expands_latents(Reversed)
    assert not _latents.expands_latents(torch.nn.Linear)


def test_compiled():
    """A step after a prompt that was not."""
    model, tokens = make("youtu", num_hidden_layers=1), torch.randint(2, 61, (2, TOKENS))
    expected = step_and_gradients(model, tokens)
    model.set_attn_implementation("qkv")
    cache = transformers.DynamicCache(config=model.config)
    first = model(tokens[:, :7], past_key_values=cache).logits
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    second = model(tokens[:, 7:], past_key_values=cache).logits
    torch._dynamo.reset()
    assert_close(torch.cat([first, second], 1), expected[0], atol=1e-5, rtol=1e-4)


# Masks


def latents(queries, keys):
    """A query, and latents for its keys."""
    model = make("deepseek_v2", num_hidden_layers=1)
    model.set_attn_implementation("qkv")
    module = latent_attentions(model)[0].requires_grad_(False)
    key = _latents.Latents(torch.randn(2, 1, keys, 16), torch.randn(2, 1, keys, 4), module)
    return torch.randn(2, 4, queries, 12), key


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", mask_functions())
def test_masks(name, padding):
    """Each mask of transformers gives what it gives for expanded keys."""
    user = None if padding == "none" else torch.ones(2, 8, dtype=torch.bool)
    if user is not None:
        user[1, slice(0, 2) if padding == "left" else slice(6, 8)] = False
    function = mask_functions()[name]
    for queries, keys, offset in ((8, 8, 0), (3, 8, 5), (3, 8, 2), (1, 8, 7)):
        if keys != queries and ("places" in name or "packed" in name or name == "falling"):
            continue
        query, key = latents(queries, keys)
        assert key.shape == key.expanded()[0].shape
        mask = _masks.make_mask(2, queries, keys, offset, 0, function, user)
        options = {"softcap": 2.0, "s_aux": torch.randn(4), "scaling": 0.3}
        found, expected = (
            _attention.attention_forward(key.module, query, *pair, mask, **options)[0]
            for pair in ((key, key), key.expanded())
        )
        assert_close(found, expected)


@pytest.mark.parametrize("position_bias, causal", [(True, False), (False, True)])
def test_without_a_mask(position_bias, causal):
    query, key = latents(5, 7)
    options = {"is_causal": causal}
    options["position_bias"] = torch.randn(1, 4, 5, 7) if position_bias else None
    found, expected = (
        _attention.attention_forward(key.module, query, *pair, None, **options)[0]
        for pair in ((key, key), key.expanded())
    )
    assert_close(found, expected)


def test_dropout():
    """The mean of many is what it is without, of which each differs."""
    query, key = latents(1, 400)
    key = _latents.Latents(key.latents + 1, key.rotary, key.module)
    query = query.expand(-1, -1, 300, -1)
    found, expected = (
        _attention.attention_forward(key.module, query, key, key, None, p, is_causal=False)[0]
        for p in (0.5, 0.0)
    )
    spread = found.std(1).amax()
    assert spread > 0.01
    assert_close(found.mean(1), expected.mean(1), atol=5 * spread / 300**0.5, rtol=0)


# The cache


@pytest.fixture
def rows(monkeypatch):
    """Of each call of latent_attention, whether latent and rotary part come as one row."""
    calls = []
    operator = qkv.latent_attention
    monkeypatch.setattr(
        qkv, "latent_attention", lambda *x, **o: calls.append(x[3] is None) or operator(*x, **o)
    )
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_cache_generates_the_same(name, rows):
    """With a prompt that is padded on the left, and more tokens than any window."""
    call = inputs(name, left=True)
    del call["labels"]
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    model = make(name)
    expected = model.generate(**call, **options, output_logits=True)
    model.set_attn_implementation("qkv")
    cache = LatentCache(model.config)
    found = model.generate(**call, **options, output_logits=True, past_key_values=cache)
    assert found.past_key_values is cache
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-4)
    assert any(rows)
    assert all(rows) or name == "dots3_note"  # of a window there are few keys


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_static_caches(name, rows):
    """Transformers' own has the numbers that eager attention has with it, which are others where an
    indexer chooses among rows that are still empty; ours has the same, and is one row a token."""
    call = inputs(name, left=True)
    del call["labels"]
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    model, results = make(name), []
    for way, kind in [
        ("eager", transformers.StaticCache),
        ("qkv", transformers.StaticCache),
        ("qkv", StaticLatentCache),
    ]:
        model.set_attn_implementation(way)
        rows.clear()
        cache = kind(config=model.config, max_cache_len=40)
        results.append(model.generate(**call, **options, output_logits=True, past_key_values=cache))
    assert any(rows)
    for found in results[1:]:
        assert torch.equal(found.sequences, results[0].sequences)
        expected = torch.stack(results[0].logits)
        assert_close(torch.stack(found.logits), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_static_cache_where_gradients_are_recorded(name):
    """As without torch.no_grad(), which transformers' own does not need."""
    model, tokens = make(name), torch.randint(2, 61, (2, TOKENS))
    model.set_attn_implementation("qkv")
    caches = (kind(model.config, 40) for kind in (StaticLatentCache, transformers.StaticCache))
    found, expected = (step(model, tokens, cache) for cache in caches)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_cache_is_what_a_dynamic_one_is(kind):
    """After whatever may be done to one, with copies in between, of which each goes on alone."""
    torch.manual_seed(0)
    config = make(kind).config
    pairs = [(transformers.DynamicCache(config=config), LatentCache(config))]
    order = torch.tensor([1, 0, 1])

    def step(cache, keys, values, index):
        for layer in range(2):
            cache.update(keys + layer, values + layer, layer)
            if kind == "deepseek_v32":
                cache.update_indexer(index + layer, layer)

    changes = {
        "crop": lambda cache: cache.crop(-2),
        "reorder": lambda cache: cache.reorder_cache(order % cache.layers[0].keys.shape[0]),
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
        "reset": lambda cache: cache.reset(),
    }
    for change in [None, None, "crop", "copy", None, "reorder", None, "repeat", "crop", "select",
                   "copy", "reset", None, None]:  # fmt: skip
        if change == "copy":
            pairs.append(copy.deepcopy(pairs[0]))
        for expected, found in pairs:
            if change in changes:
                changes[change](expected), changes[change](found)
            for length in (5, 1, 1, 1):
                batch = 2 if expected.layers[0].keys is None else expected.layers[0].keys.shape[0]
                new = [torch.randn(batch, 1, length, n) for n in (16, 4)]
                new.append(torch.randn(batch, length, 8))
                step(expected, *new), step(found, *new)
        for expected, found in pairs:
            assert found.get_seq_length() == expected.get_seq_length()
            for a, b in zip(expected.layers, found.layers, strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
                if kind == "deepseek_v32":
                    assert torch.equal(a.indexer_keys, b.indexer_keys)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_shallow_copies_of_a_layer_go_on_alone(kind):
    """As those of DynamicCache, which never writes to what it has."""
    config = make(kind).config
    found, expected = (
        LatentCache(config).layers[0],
        transformers.DynamicCache(config=config).layers[0],
    )
    steps = [(torch.randn(2, 1, 1, 16), torch.randn(2, 1, 1, 4)) for _ in range(7)]
    pairs = [(found, expected)]
    for turn, new in enumerate(steps):
        if turn == 5:
            pairs.append(tuple(copy.copy(layer) for layer in pairs[0]))
            assert all(type(x) is type(y) for x, y in zip(*pairs, strict=True))
        for i, layers in enumerate(pairs):
            for layer in layers:
                layer.update(*(x + i for x in new))
    for found, expected in pairs:
        assert torch.equal(found.keys, expected.keys)
        assert torch.equal(found.values, expected.values)


@torch.no_grad()
@pytest.mark.parametrize("part", [
    lambda x: x[:, :, 2:], lambda x: x[:, :, ::2], lambda x: x[:1], lambda x: x[1:],
    lambda x: x[:1].expand_as(x), lambda x: x[..., :2, :],
])  # fmt: skip
def test_cache_of_which_a_part_is_kept(part):
    """As where the oldest tokens are dropped: such a part is a view of the same buffer."""
    config = make("deepseek_v3").config
    caches = transformers.DynamicCache(config=config), LatentCache(config)
    layers = [cache.layers[0] for cache in caches]
    for length in (5, 1, 1, 1):
        new = torch.randn(2, 1, length, 16), torch.randn(2, 1, length, 4)
        for layer in layers:
            layer.update(*new)
    for layer in layers:
        layer.keys, layer.values = part(layer.keys), part(layer.values)
    for _ in range(2):
        batch = layers[0].keys.shape[0]
        new = torch.randn(batch, 1, 1, 16), torch.randn(batch, 1, 1, 4)
        found = [layer.update(*new) for layer in layers]
        assert all(map(torch.equal, *found))


@torch.no_grad()
def test_cache_copies_what_it_keeps_seldom():
    """Of 1000 steps some 20 move the rows, and the others leave them where they are."""
    layer = LatentCache(make("deepseek_v3").config).layers[0]
    places = {layer.update(torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 4))[0].data_ptr()}
    buffers = []
    for _ in range(1000):
        keys, values = layer.update(torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 4))
        places.add(keys.data_ptr())
        if not buffers or buffers[-1] is not layer.buffer:
            buffers.append(layer.buffer)
        assert _latents._one_row(keys, values).data_ptr() == keys.data_ptr()
    assert len(buffers) < 20 and sum(len(b[0, 0]) for b in buffers) < 5000


def test_cache_in_and_out_of_inference_mode():
    """Also while there is room in a buffer that was made in the other."""
    model = make("deepseek_v2")
    model.set_attn_implementation("qkv")
    tokens = torch.randint(2, 61, (2, TOKENS))
    expected = model(tokens).logits
    cache, found = LatentCache(model.config), []
    modes = 5 * [torch.inference_mode] + 4 * [torch.no_grad] + [torch.enable_grad]
    modes += 3 * [torch.inference_mode]
    for mode, part in zip(modes, tokens.split(1, 1), strict=True):
        with mode():
            found.append(model(part, past_key_values=cache).logits.clone())
    assert_close(torch.cat([x.detach() for x in found], 1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_a_cache(name):
    """Of all parameters. Keys that are added later leave those alone which a gradient needs."""
    model, tokens = make(name, **unmixed(name)), torch.randint(2, 61, (1, TOKENS))
    expected = step_and_gradients(model, tokens, parts=6)
    calls = [
        ("eager", LatentCache(model.config)),
        ("qkv", None),
        ("qkv", LatentCache(model.config)),
    ]
    for implementation, cache in calls:
        model.set_attn_implementation(implementation)
        found = step_and_gradients(model, tokens, cache, parts=6)
        assert_close(found, expected, atol=1e-5, rtol=1e-4)


def unmixed(name):
    """A config without linear attention, which cannot be differentiated through a cache."""
    config = MODELS[name][1]
    if name == "glm5_next":
        layers = {"layer_types": ["indexed_attention"] * 2}
        return {"text_config": config["text_config"] | layers}
    return {"layer_types": ["full_attention"] * 2} if "linear_attention" in str(config) else {}


@torch.no_grad()
@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 2},
])  # fmt: skip
def test_cache_with_beams_and_candidates(options):
    """What reorders a cache, and what takes back its last tokens."""
    model = make("glm4_moe_lite")
    tokens = torch.randint(2, 61, (1, TOKENS)).repeat(1, 2)
    options = options | {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(tokens, **options)
    model.set_attn_implementation("qkv")
    found = model.generate(tokens, **options, past_key_values=LatentCache(model.config))
    assert torch.equal(found, expected)


def test_no_such_name():
    with pytest.raises(AttributeError, match="no attribute 'LatentCach'"):
        qkv.integrations.transformers.LatentCach  # noqa: B018


# Keys that an indexer chose


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("given", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("kind", ["indices", "block_indices"])
def test_chosen_keys(kind, given, weights):
    """Against the mask that says the same, element by element; -1 is none."""
    query, key, value = qkv_heads(2, 4, 2, 6, 7)
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 2
    shape, most = ((2, 6, 3), 7) if kind == "indices" else ((2, 2, 6, 3), 4)
    chosen = torch.randint(-1, most, shape)
    visible = torch.zeros(2, 4, 6, 7, dtype=torch.bool)
    for b, h, i, j in torch.ones_like(visible).nonzero().tolist():
        places = chosen[b, i] if kind == "indices" else chosen[b, h // 2, i]
        visible[b, h, i, j] = (j if kind == "indices" else j // 2) in places.tolist()
    mask = None
    if given == "causal":
        visible &= torch.ones(6, 7, dtype=torch.bool).tril()
    elif given != "none":
        seen = torch.rand(2, 1, 6, 7) > 0.3
        visible &= seen
        mask = seen if given == "bool" else torch.zeros(2, 1, 6, 7).masked_fill(~seen, -1e9)
    options = {kind: chosen, "is_causal": given == "causal", "output_attentions": weights}
    found, _ = _attention.attention_forward(module, query, key, value, mask, **options)
    expected = qkv.attention(query, key, value, attn_mask=visible, enable_gqa=True)
    assert_close(found.transpose(1, 2)[visible.any(-1)], expected[visible.any(-1)])


@torch.no_grad()
@pytest.mark.parametrize("name", CHOOSING)
def test_the_operator_gets_the_chosen_keys(monkeypatch, name):
    """In the prompt and in steps. GLM 5.3's own code makes a mask of them."""
    given = []
    for operator in ("attention", "latent_attention"):
        monkeypatch.setattr(qkv, operator, watched(getattr(qkv, operator), given))
    model = make(name)
    model.set_attn_implementation("qkv")
    step(model, torch.randint(2, 61, (2, TOKENS)), parts=3)
    layers = model.config.get_text_config().layer_types
    expected = [
        name != "glm5_next" and x == "indexed_attention" for x in layers if x != "linear_attention"
    ]
    assert given == 3 * expected


def watched(operator, given):
    """The operator, which also notes whether it is given indices."""
    return lambda *x, **o: given.append(o.get("indices") is not None) or operator(*x, **o)


def test_blocks_of_minimax():
    """The one family whose indexer chooses blocks."""
    torch.manual_seed(0)
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=16, dense_intermediate_size=48,
        shared_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        index_n_heads=2, index_head_dim=8, index_block_size=2, index_topk_blocks=3,
        index_local_blocks=1, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"], pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config).eval()
    tokens, mask = padded(left=False)

    @torch.no_grad()
    def run(model):
        cache = transformers.DynamicCache(config=config)
        first = model(tokens, attention_mask=mask, past_key_values=cache).last_hidden_state
        mask_of_more = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        more = model(tokens[:, :1], attention_mask=mask_of_more, past_key_values=cache)
        return first[mask.bool()], more.last_hidden_state

    expected, found = both(model, run)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_an_indexer_sees_fewer_keys():
    """Or the tests of models would say nothing of it: each chooses 5 of 13."""
    for name in CHOOSING:
        model, call = make(name), inputs(name)
        model.set_attn_implementation("qkv")
        few = seen(name, call, model(**call).logits)
        text = getattr(model.config, "text_config", model.config)
        text.index_topk = 16
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 16
        assert not torch.allclose(few, seen(name, call, model(**call).logits), atol=1e-3)
