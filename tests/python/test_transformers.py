"""transformers' models with attn_implementation="qkv", against the same models with "eager"."""

import sys
from pathlib import Path

import latent_models
import pytest
import torch
from common import run_python
from forks import run_forked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

import qkv.integrations.transformers  # noqa: E402

qkv.integrations.transformers.register()

from qkv.integrations.transformers import (  # noqa: E402
    _attention,
    _latents,
    _masks,
    _pattern,
    _pattern_mask,
)

TEXT = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TEXT | {
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = DECODER | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "eos_token_id": None,
}  # fmt: skip
WHISPER = {
    "vocab_size": 61, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_source_positions": 15, "max_target_positions": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}  # fmt: skip

MODELS = {
    "bert": ("BertForMaskedLM", TEXT | {
        "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {
        "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8,
    }),
    "gpt_oss": ("GptOssForCausalLM", GROUPED | {
        "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "modernbert": ("ModernBertForMaskedLM", TEXT | {
        "intermediate_size": 48, "local_attention": 6, "global_attn_every_n_layers": 2,
        "pad_token_id": 0, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
    }),
    "t5": ("T5ForConditionalGeneration", T5),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
    "vit": ("ViTForImageClassification", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 5,
        "intermediate_size": 48, "image_size": 16, "patch_size": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
}  # fmt: skip
MODELS |= latent_models.MODELS
CAUSAL = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss", *latent_models.MODELS)
TOKENS = 13  # more than any window


def make(name, **changes):
    """The same weights for the same name, with eager attention."""
    torch.manual_seed(0)
    model_class, config = MODELS[name]
    model_class = getattr(transformers, model_class)
    model = model_class(model_class.config_class(**(config | changes))).eval()
    with torch.no_grad():  # what starts at 0 or 1 would hide mistakes
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.set_attn_implementation("eager")
    return model


def padded(left):
    """Tokens of two rows, the second of which is padded, and their mask."""
    tokens = torch.randint(2, 61, (2, TOKENS))
    mask = torch.ones_like(tokens)
    (mask[1, :4] if left else mask[1, -4:]).zero_()
    return tokens * mask, mask


def inputs(name, left=False):
    """What the model is called with, its labels among it."""
    tokens, mask = padded(left)
    labels = tokens.masked_fill(mask == 0, -100)
    if left and name in CAUSAL:
        labels[1, 4] = -100  # what would be predicted from padding
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 30), "labels": labels}
    if name == "t5":
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels[:, :7].contiguous()}
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def both(model, call):
    """What call(model) returns, with eager and with qkv."""
    results = []
    for implementation in ("eager", "qkv"):
        model.set_attn_implementation(implementation)
        results.append(call(model))
    return results


def seen(name, call, logits):
    """The logits of what is not padding."""
    if name in ("t5", "whisper", "vit"):
        return logits
    return logits[call["attention_mask"].bool()]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_losses_and_gradients(name, left):
    call = inputs(name, left)

    def run(model):
        model.zero_grad()
        output = model(**call)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return seen(name, call, output.logits), output.loss, gradients

    expected, found = both(make(name), run)
    assert expected[2]
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_labels_that_padding_predicts():
    """What "eager" makes of a query that sees nothing reaches the loss then; not so of "sdpa"."""
    call = inputs("llama", left=True)
    call["labels"][1, 4] = call["input_ids"][1, 4]
    model, found = make("llama"), {}
    for implementation in ("eager", "sdpa", "qkv"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**call).loss.backward()
        found[implementation] = model.lm_head.weight.grad.clone()
    assert_close(found["qkv"], found["sdpa"], atol=1e-6, rtol=1e-4)
    assert not torch.allclose(found["qkv"], found["eager"], atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "t5", "youtu"])
def test_second_order_and_forward_mode(name):
    """A product of the Hessian and a direction in all parameters, and the tangent of the loss. The
    models round to float32 here and there, whatever their dtype."""
    call = inputs(name)
    model = make(name).double()
    parameters = dict(model.named_parameters())
    along = {n: torch.linspace(-1, 1, p.numel()).view_as(p).to(p) for n, p in parameters.items()}

    def run(model):
        grads = torch.autograd.grad(
            model(**call).loss, parameters.values(), create_graph=True, allow_unused=True
        )
        moved = [(g * along[n]).sum() for n, g in zip(parameters, grads, strict=True)
                 if g is not None]  # fmt: skip
        product = torch.autograd.grad(sum(moved), parameters.values(), allow_unused=True)
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(p, along[n]) for n, p in parameters.items()}
            loss = torch.func.functional_call(model, duals, kwargs=call).loss
            tangent = forward_ad.unpack_dual(loss).tangent.detach()
        return torch.cat([x.flatten() for x in product if x is not None]), tangent

    (expected, tangent), found = both(model, run)
    assert (found[0] - expected).norm() <= 1e-5 * expected.norm() > 0
    assert_close(found[1], tangent, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_the_gradients_of_each_row(name):
    """By torch.func, of rows that are padded: nobody can ask for the numbers of their masks."""
    call = inputs(name)
    model = make(name)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def of_a_row(**row):
        row = {n: x[None] for n, x in row.items() if n != "labels"}

        def loss(parameters):
            logits = torch.func.functional_call(model, parameters, kwargs=row).logits
            return (logits * row["attention_mask"][..., None]).square().sum()

        return torch.func.grad(loss)(parameters)

    rows = [of_a_row(**{n: x[i] for n, x in call.items()}) for i in range(2)]  # by "eager"
    model.set_attn_implementation("qkv")
    found = torch.vmap(lambda call: of_a_row(**call))(call)
    assert_close(found, {n: torch.stack([x[n] for x in rows]) for n in found}, atol=1e-4, rtol=1e-3)


GENERATIVE = (*CAUSAL, "t5", "whisper")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATIVE)
def test_greedy_generation(name, cache):
    """Longer than the windows; the second row's prompt is padded on the left."""
    call = inputs(name, left=True)
    del call["labels"]
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "cache_implementation": cache}
    expected, found = both(make(name), lambda model: model.generate(**call, **options))
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == 9
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", GENERATIVE)
def test_several_tokens_after_a_cache(name):
    """Keys begin before queries do."""
    tokens = torch.randint(2, 61, (2, TOKENS))
    head = {k: v for k, v in inputs(name).items() if k not in ("labels", "attention_mask")}
    key = "decoder_input_ids" if name in ("t5", "whisper") else "input_ids"

    def run(model):
        first = model(**(head | {key: tokens[:, :8]}), use_cache=True)
        rest = {key: tokens[:, 8:]}
        if key != "input_ids":
            rest["encoder_outputs"] = (first.encoder_last_hidden_state,)
        return model(**rest, past_key_values=first.past_key_values).logits

    expected, found = both(make(name), run)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions(name):
    """Of the rows that are not padding: there are windows in which a padded row sees nothing."""
    call = inputs(name) | {"output_attentions": True}
    names = ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions")

    def run(model):
        output = model(**call)
        weights = {n: output[n] for n in names if n in output}
        if "attentions" in weights and "attention_mask" in call:
            rows = call["attention_mask"].bool()
            weights["attentions"] = [w.transpose(1, 2)[rows] for w in weights["attentions"]]
        return seen(name, call, output.logits), weights

    expected, found = both(make(name), run)
    assert expected[1]
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def qkv_heads(batch=1, heads=2, kv_heads=2, queries=6, keys=6):
    """query, key and value, laid out as models have them."""
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(batch, n, h, 8).transpose(1, 2) for n, h in shapes]


def test_dropout():
    """The weights that are returned are those that were used."""
    query, key, value = qkv_heads(queries=40, keys=50)
    output, weights = _attention.attention_forward(
        torch.nn.Module(), query, key, value, None, dropout=0.5, is_causal=False,
        output_attentions=True,
    )  # fmt: skip
    assert 0.4 < (weights == 0).float().mean() < 0.6
    assert_close(output, (weights @ value).transpose(1, 2))
    assert output.is_contiguous()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "mistral", "t5", "deepseek_v3"])
def test_gradient_checkpointing(name, reentrant):
    """The same weights are dropped when a layer is computed again."""
    changes = {
        "bert": {"attention_probs_dropout_prob": 0.3}, "mistral": {"attention_dropout": 0.3},
        "t5": {"dropout_rate": 0.3}, "deepseek_v3": {"attention_dropout": 0.3},
    }  # fmt: skip
    model = make(name, **changes[name]).train()
    model.set_attn_implementation("qkv")
    call = inputs(name)

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(**call).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_close(gradients(), expected, atol=1e-6, rtol=1e-5)


def test_checkpointing_where_a_layer_reads_the_mask():
    """The first layer goes the same way when it is computed again, and the mask has been written
    out for whoever read it."""
    model = make("mistral").train()
    model.set_attn_implementation("qkv")
    masks = []
    model.model.layers[0].register_forward_hook(
        lambda layer, args, given, output: masks.append((~given["attention_mask"]).sum()),
        with_kwargs=True,
    )
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model(**inputs("mistral")).loss.backward()
    assert masks


def test_what_is_written_to_a_mask_counts():
    """Also where it was read before."""
    query, key, value = qkv_heads()
    mask = _masks.make_mask(1, 6, 6)
    mask.any()
    mask[:, :, :, 0].fill_(False)
    mask[:, :, 0, 1] = True
    found, _ = _attention.attention_forward(torch.nn.Module(), query, key, value, mask)
    dense = torch.ones(6, 6, dtype=torch.bool).tril()
    dense[:, 0], dense[0, 1] = False, True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense)
    assert_close(found, expected.transpose(1, 2))


# Masks


@pytest.fixture
def unwritten(monkeypatch):
    """Fails the test where an L x S mask is written, or given to an operator."""

    def written(*args, **kwargs):
        raise AssertionError("a mask of all queries and keys was written")

    monkeypatch.setattr(_masks._private, "sdpa_mask", written)
    monkeypatch.setattr(_pattern_mask.PatternMask, "written", property(written))

    def watch(operator):
        def watched(*args, attn_mask=None, **options):
            assert attn_mask is None or attn_mask.shape[-2] == 1
            return operator(*args, attn_mask=attn_mask, **options)

        return watched

    for name in ("attention", "latent_attention"):
        monkeypatch.setattr(qkv, name, watch(getattr(qkv, name)))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", [x for x in MODELS if x not in latent_models.CHOOSING])
def test_no_mask_is_written(unwritten, name, left):
    model = make(name)
    model.set_attn_implementation("qkv")
    model.train()
    model(**inputs(name, left)).loss.backward()
    model(**{k: v for k, v in inputs(name).items() if k != "attention_mask"}).loss.backward()


def test_no_mask_is_written_for_packed_input(unwritten):
    model = make("mistral")
    model.set_attn_implementation("qkv")
    packed, _, _ = documents()
    model(**packed, labels=packed["input_ids"]).loss.backward()


def test_no_mask_is_written_for_a_long_prompt_in_a_static_cache(unwritten):
    model = make("mistral")
    model.set_attn_implementation("qkv")
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        for _ in range(2):
            model(torch.randint(2, 61, (2, TOKENS)), past_key_values=cache)


def documents(position_ids=True, cu_seq_lens=False):
    """Three documents in a row: the packed call, the documents, and where they end."""
    lengths = (7, 9, 1)
    rows = [torch.randint(2, 61, (1, n)) for n in lengths]
    call = {"input_ids": torch.cat(rows, 1)}
    if position_ids:
        call["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    if cu_seq_lens:
        bounds = torch.tensor([0, 7, 16, 17], dtype=torch.int32)
        call |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        call |= {"max_length_q": 9, "max_length_k": 9}
    return call, rows, lengths


@pytest.mark.parametrize("name, cu_seq_lens", [
    ("llama", False), ("mistral", False), ("gemma2", False), ("mistral", True), ("gpt_oss", True),
    ("deepseek_v3", False), ("youtu", True),
])  # fmt: skip
def test_packed_documents(name, cu_seq_lens):
    """Every document as if it were alone. (gpt-oss does not pass positions on to its mask.)"""
    model = make(name)
    call, rows, _ = documents(cu_seq_lens=cu_seq_lens)

    def run(calls):
        model.zero_grad()
        logits = torch.cat([model(**call, use_cache=False).logits for call in calls], 1)
        logits.square().sum().backward()
        return logits, [p.grad for p in model.parameters()]

    expected = run([{"input_ids": row} for row in rows])
    model.set_attn_implementation("qkv")
    assert_close(run([call]), expected, atol=3e-4, rtol=1e-4)


def test_documents_by_their_bounds_alone():
    """As data collators for FlashAttention make them, with positions that go on."""
    query, key, value = qkv_heads(heads=4, queries=17, keys=17)
    _, _, lengths = documents()
    bounds = torch.tensor([0, 7, 16, 17])
    for window, causal in ((None, True), (None, False), (3, True), (3, False)):
        found, _ = _attention.attention_forward(
            torch.nn.Module(), query, key, value, None, is_causal=causal, sliding_window=window,
            cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
        )  # fmt: skip
        parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
        left = -1 if window is None else window - 1
        expected = [
            qkv.attention(*part, window_size=(left, 0 if causal else left), enable_gqa=True)
            for part in parts
        ]
        assert_close(found, torch.cat(expected, 2).transpose(1, 2))


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "deepseek_v32"])
def test_packed_rows_of_a_batch(name):
    model = make(name)
    tokens = torch.randint(2, 61, (2, TOKENS))
    places = torch.stack([torch.arange(TOKENS) % 7, torch.arange(TOKENS) % 10])
    expected, found = both(model, lambda m: m(tokens, position_ids=places, use_cache=False).logits)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def mask_functions():
    from transformers import masking_utils as m

    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]] * 2)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]] * 2)
    window = m.sliding_window_causal_mask_function(3)
    packed = m.packed_sequence_mask_function
    found = {
        "causal": m.causal_mask_function,
        "bidirectional": m.bidirectional_mask_function,
        "window": window,
        "bidirectional window": m.sliding_window_bidirectional_mask_function(2),
        "packed": m.and_masks(window, packed(documents)),
        "falling": packed(documents.flip(1)),
        "chunked": m.chunked_causal_mask_function(3, torch.tensor([0, 1])),
        "one chunk": m.chunked_causal_mask_function(9, torch.tensor([0, 0])),
        "blocks": m.or_masks(window, m.blockwise_overlay(documents - 1)),
        "packed blocks": m.or_masks(
            m.and_masks(window, packed(documents)), m.blockwise_overlay(2 - documents)
        ),
        "window of nothing or blocks": m.or_masks(
            m.sliding_window_causal_mask_function(0), m.blockwise_overlay(documents - 1)
        ),
        "blocks in pieces": m.blockwise_overlay(documents % 2),
        "own": lambda batch, head, query, key: (key <= query) | (key < 2),
    }
    if hasattr(m, "packed_sequence_compatibility_function"):  # transformers 5.23
        compatible = m.packed_sequence_compatibility_function
        found["packed places"] = compatible(window, places, documents)
        found["jumping places"] = compatible(window, 2 * places, documents)
        chunked = m.chunked_causal_mask_function(2, torch.tensor([0, 1]))
        found["packed chunks"] = compatible(chunked, places, documents)
        found["places alone"] = m.remap_positions_for_packed_sequence(window, places)
    return found


PATTERNS = (
    "causal", "bidirectional", "window", "bidirectional window", "packed", "packed places",
    "chunked", "one chunk", "blocks", "packed blocks",
)  # fmt: skip
FIXED = (
    "packed", "falling", "packed places", "jumping places", "packed chunks", "places alone",
)  # fmt: skip


@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("name", mask_functions())
def test_masks_mean_what_transformers_does(name, padding):
    """Each mask, with and without a cache, by its elements and by what attention makes of it."""
    function = mask_functions()[name]
    cut = {"none": None, "left": 2, "right": 6, "short": 6}[padding]
    user = None
    if cut is not None:
        user = torch.ones(2, 8, dtype=torch.bool)
        (user[1, :cut] if padding == "left" else user[1, cut:]).zero_()
        user = user[:, :7] if padding == "short" else user
    fixed = name in FIXED
    seen_patterns = 0
    for queries, keys, q_offset, kv_offset in (
        (8, 8, 0, 0), (3, 8, 5, 0), (3, 8, 2, 0), (3, 8, torch.tensor(1), 0), (1, 8, 7, 0),
        (2, 5, 6, 3), (3, 8, 0, 0), (8, 3, 0, 0), (4, 2, 0, 6),
    )[: 1 if fixed else None]:  # fmt: skip
        call = (2, queries, keys, q_offset, kv_offset, function, user)
        expected = _masks._private.sdpa_mask(*call, allow_is_causal_skip=False)
        found = _masks.make_mask(*call, allow_is_causal_skip=name in PATTERNS)
        assert found is None or isinstance(found, _pattern_mask.PatternMask)
        seen_patterns += found is not None and found.dense is None
        q, k, v = qkv_heads(2, 4, 2, queries, keys)
        (output, weights), (plain, plain_weights), (only, _) = (
            _attention.attention_forward(torch.nn.Module(), q, k, v, m, output_attentions=w)
            for m, w in ((expected, True), (found, True), (found, False))
        )
        assert_close(plain, output)
        assert_close(only, output)
        assert_close(plain_weights, weights)
        found = torch.ones_like(expected) if found is None else found.written
        assert torch.equal(found.expand_as(expected), expected)
    assert (seen_patterns > 0) == (name in PATTERNS and not (fixed and user is not None))


def test_keys_behind_the_end_of_a_row_are_not_computed(monkeypatch):
    """BERT's padding on the right is a number of keys for each row."""
    calls = []
    operator = qkv.varlen_attn
    monkeypatch.setattr(qkv, "varlen_attn", lambda *x, **o: calls.append(o) or operator(*x, **o))
    model = make("bert")
    model.set_attn_implementation("qkv")
    model(**inputs("bert"))
    assert [call["seqused_k"].tolist() for call in calls] == [[TOKENS, TOKENS - 4]] * 2


def test_a_mask_that_a_model_touches():
    """Slices that leave nothing out keep a mask unwritten; anything else sees its elements, also
    when it writes to them."""
    mask = _masks.make_mask(2, 6, 6, attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]) > 0)
    expected = _masks._private.sdpa_mask(
        2, 6, 6, attention_mask=mask.padding, allow_is_causal_skip=False
    )
    same = mask[:, :, :, :6].detach().contiguous().to("cpu")
    assert isinstance(same, _pattern_mask.PatternMask) and same.dense is None
    assert "padding" in repr(same)
    assert torch.equal(~mask, ~expected)
    assert torch.equal(same[:, :, 2:, :4], expected[:, :, 2:, :4])
    assert torch.equal(torch.where(mask, 0.0, 1.0), torch.where(expected, 0.0, 1.0))

    x = qkv_heads(2)
    row = _masks.make_mask(2, 1, 6, 5, attention_mask=mask.padding)
    unknown = _masks.make_mask(2, 6, 6, mask_function=lambda batch, head, query, key: key < 2)
    for one in (mask[..., :6], mask[..., :5, :4], row, row[:, :, :, 1:], unknown, unknown[0]):
        scores = torch.zeros(2, 2, *one.shape[-2:])
        for mistake in (scores.add, scores.add_):
            with pytest.raises(NotImplementedError, match="aten.add.* with a mask that is True"):
                mistake(one)
        with pytest.raises(NotImplementedError, match="aten.masked_fill"):
            scores.masked_fill(one, -1.0)

    mask = _masks.make_mask(1, 6, 6)
    mask[0, 0, 0, 5] = True
    expected = torch.ones(6, 6).tril() > 0
    expected[0, 5] = True
    found, _ = _attention.attention_forward(torch.nn.Module(), *x, mask)
    assert_close(found, qkv.attention(*x, attn_mask=expected).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_mask_of_the_users(name, dtype):
    """[B, 1, L, S] is taken as it is, and not for causal."""
    tokens = torch.randint(2, 61, (2, 6))
    mask = torch.rand(2, 1, 6, 6) > 0.4
    mask |= torch.eye(6, dtype=torch.bool)
    call = {"input_ids": tokens}
    if name == "t5":
        call["decoder_input_ids"] = tokens

    def run(model):
        kind = torch.float32 if model.config._attn_implementation == "eager" else dtype
        given = mask
        if kind != torch.bool:
            given = torch.zeros(2, 1, 6, 6, dtype=kind).masked_fill(~mask, -1e9)
        return model(**call, attention_mask=given).logits

    expected, found = both(make(name), run)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


# Generation in a changing batch


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:The `paged|` prefix:FutureWarning")
@pytest.mark.parametrize("name, implementation", [
    ("mistral", "qkv"), ("gemma2", "paged|qkv"), ("gpt_oss", "qkv"),
])  # fmt: skip
def test_continuous_batching(name, implementation):
    """More requests than fit in a batch, longer than the windows, against one after the other."""
    model = make(name)
    prompts = [torch.randint(2, 61, (n,)).tolist() for n in (3, 11, 7, 1)]
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(implementation)
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options, eos_token_id=None),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=8, max_batch_tokens=16, max_requests_per_batch=3
        ),
    )
    found = [outputs[name].generated_tokens for name in sorted(outputs, key=request_number)]
    assert found == expected


def request_number(name):
    return int(name.rsplit("_", 1)[1])


# Around the models


@pytest.mark.parametrize("layers_only", [False, True])
def test_compiled(layers_only):
    """The model as a whole, or each of its layers, which then get a mask from outside."""
    model = make("mistral", num_hidden_layers=1)
    call = inputs("mistral")

    def run(f):
        model.zero_grad()
        output = f(**call)
        output.loss.backward()
        return seen("mistral", call, output.logits), [p.grad for p in model.parameters()]

    expected = run(model)
    model.set_attn_implementation("qkv")
    if layers_only:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        found = run(model)
    else:
        found = run(torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_compiled_layers_with_a_cache(cache):
    """Each step's mask hides other places: there are more steps than torch compiles anew, beyond
    which a full graph is an error."""
    model, tokens = make("llama", num_hidden_layers=1), torch.randint(2, 61, (2, 40))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    expected = model(tokens, attention_mask=mask).logits
    model.set_attn_implementation("qkv")
    model.model.layers[0].compile(backend="eager", fullgraph=True)
    past, found, end = transformers.DynamicCache(config=model.config), [], 0
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=48)
    for part in tokens.split([5, 3, 1, 4, 1, 2, 6, 1, 1, 3, 1, 5, 1, 2, 4], 1):
        end += part.shape[1]
        found.append(model(part, attention_mask=mask[:, :end], past_key_values=past).logits)
    torch._dynamo.reset()
    seen = mask.bool()
    assert_close(torch.cat(found, 1)[seen], expected[seen], atol=1e-5, rtol=1e-4)


T5_STEPS = """
import torch, torchvision_operators, transformers, qkv.integrations.transformers
qkv.integrations.transformers.register()

def step(model, length):
    tokens = torch.randint(2, 61, (16, length))
    mask = torch.ones_like(tokens)
    mask[:, length // 2:] = torch.arange(16)[:, None] % 2
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    (hidden * mask[..., None]).square().sum().backward()

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

config = transformers.T5Config(
    vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=8)
for name in ("qkv", "eager"):
    model = transformers.T5EncoderModel._from_config(config, attn_implementation=name).train()
    step(model, 32)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak restarts from what is resident now
    before = peak()
    step(model, 512)
    print(peak() - before)
"""


@pytest.mark.long
def test_t5_needs_no_bias_for_each_batch_item():
    """All scores of all batch items would be 128 MB, the bias is 8 MB."""
    ours, eager = map(float, run_python(T5_STEPS, 300, cwd=Path(__file__).parent).split())
    assert ours < 128 < eager


def test_transformers_is_not_imported_with_qkv():
    code = "import sys, qkv, qkv.integrations.transformers; print('transformers' in sys.modules)"
    assert run_forked(code) == "False\n"


@pytest.mark.parametrize("found, message", [
    (None, "needs transformers 5.22 or newer, but it is not installed"),
    ("4.57.1", "needs transformers 5.22 or newer, but transformers 4.57.1 is installed"),
])  # fmt: skip
def test_missing_or_old_transformers(monkeypatch, tmp_path, found, message):
    """What is installed is what lies in the path."""
    if found:
        metadata = tmp_path / f"transformers-{found}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {found}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ImportError, match=message):
        qkv.integrations.transformers.register()


@pytest.mark.long
def test_a_version_that_lacks_a_name():
    code = """if True:
        import torchvision_operators, qkv.integrations.transformers as integration
        from transformers.utils import output_capturing
        del output_capturing._active_collector
        try:
            integration.register()
        except ImportError as error:
            print(error)
    """
    said = run_python(code, 100, cwd=Path(__file__).parent)
    assert f"was tried with transformers 5.22 to 5.24, and {transformers.__version__} lacks" in said
    assert "cannot import name '_active_collector' from 'transformers.utils.output" in said


@pytest.mark.parametrize("place", [lambda: torch.device("meta"), FakeTensorMode])
def test_register_where_tensors_have_no_numbers(monkeypatch, place):
    """As in a process that makes its first model there: mask functions are tried nevertheless."""
    integration = qkv.integrations.transformers
    for module in (_masks, _pattern):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(integration, name, module)  # the new one takes its place
        monkeypatch.delitem(sys.modules, module.__name__)
    _latents.expands_latents.cache_clear()
    with place():
        model = make("deepseek_v3")
        assert qkv.convert(model).changed
    assert integration._pattern is not _pattern
    assert len(integration._pattern._KNOWN) == len(_pattern._KNOWN)
    assert all(_latents.expands_latents(type(x.self_attn)) for x in model.model.layers)
    monkeypatch.undo()
    integration.register()


def test_register_again():
    from transformers.generation.continuous_batching import continuous_api

    switch = continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn
    qkv.integrations.transformers.register()
    assert switch is continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn


class Watched(TorchFunctionMode):
    """Remembers how torch's scaled_dot_product_attention is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_what_qkv_does_not_have_goes_to_sdpa():
    """Another device, of which the meta device is one, and another dtype, which torch does not have
    either. What sdpa cannot do is an error of transformers', or ours where it would say nothing."""
    module = torch.nn.Module()
    elsewhere = [x.to("meta") for x in qkv_heads()]
    other_dtype = [x.to(torch.float8_e4m3fn) for x in qkv_heads()]
    mask = torch.zeros(1, 1, 6, 6, device="meta")
    with Watched() as sdpa:
        output, weights = _attention.attention_forward(module, *elsewhere, mask, 0.1, 2.0)
        with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
            _attention.attention_forward(module, *other_dtype, _masks.make_mask(1, 6, 6), 0.1, 2.0)
    assert output.shape == (1, 6, 2, 8) and output.is_meta and weights is None
    given = [call["attn_mask"] for call in sdpa.calls]
    assert given[0] is mask
    assert torch.equal(given[1], torch.ones(6, 6, dtype=torch.bool).tril()[None, None])
    assert type(given[1]) is torch.Tensor
    for call in sdpa.calls:
        assert (call["dropout_p"], call["scale"], call["is_causal"]) == (0.1, 2.0, False)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        _attention.attention_forward(module, *elsewhere, None, softcap=3.0)
    with pytest.raises(NotImplementedError, match="sinks .s_aux. on meta"):
        _attention.attention_forward(module, *elsewhere, None, s_aux=torch.zeros(2))


def test_meta_model():
    with torch.device("meta"):
        model = make("llama")
    model.set_attn_implementation("qkv")
    logits = model(torch.ones(2, TOKENS, dtype=torch.int64, device="meta")).logits
    assert logits.shape == (2, TOKENS, 61)


def test_models_with_attention_of_their_own_keep_their_masks():
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()
    tokens, mask = padded(left=True)
    expected = model(tokens, attention_mask=mask).logits
    config._attn_implementation = "qkv"
    other = transformers.BloomForCausalLM(config).eval()
    assert other.config._attn_implementation == "eager"
    other.load_state_dict(model.state_dict())
    found = other(tokens, attention_mask=mask).logits
    assert_close(found[mask.bool()], expected[mask.bool()])


def test_sinks_of_each_query_would_be_left_out():
    with pytest.raises(NotImplementedError, match="Module passes sinks"):
        _attention.attention_forward(torch.nn.Module(), *qkv_heads(), None, sinks=torch.zeros(1))
