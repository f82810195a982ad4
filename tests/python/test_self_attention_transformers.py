"""qkv.nn.SelfAttention with the weights of models of transformers, against their own attention."""

import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from qkv.nn import SelfAttention  # noqa: E402

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
MODELS = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mixtral": ("Mixtral", {"sliding_window": 5, "num_local_experts": 2}),
    "qwen2": ("Qwen2", {"use_sliding_window": True} | WINDOWS),
    "qwen3": ("Qwen3", {}),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 2, "num_experts_per_tok": 1}),
    "qwen3 next": ("Qwen3Next", {
        "layer_types": ["full_attention"] * 2, "num_experts": 0,
        "rope_parameters": PARTIAL,
    }),
    "gemma 2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "gemma 3": ("Gemma3", WINDOWS | {"query_pre_attn_scalar": 4}),
    "gemma 3 of both sides": ("Gemma3", WINDOWS | {"use_bidirectional_attention": True}),
    "gpt-oss": ("GptOss", WINDOWS | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}  # fmt: skip


def make(name):
    """A model whose norms and sinks are not what they begin with."""
    torch.manual_seed(0)
    name, config = MODELS[name]
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**(SIZES | config))).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def attentions(model, tokens):
    """Each layer's attention, what it is given and what it makes of it."""
    seen = []

    def see(module, args, kwargs, output):
        seen.append((module, (*args, *kwargs.values())[0].detach(), output[0]))

    layers = model.model.layers
    hooks = [layer.self_attn.register_forward_hook(see, with_kwargs=True) for layer in layers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_steps(name):
    model, tokens = make(name), torch.randint(1, 61, (2, 13))
    for theirs, x, expected in attentions(model, tokens):
        ours = SelfAttention.from_transformers(theirs)
        output = ours(x)
        assert_close(output, expected, rtol=1e-4, atol=1e-5)
        seed = torch.randn_like(output)
        theirs_grads = torch.autograd.grad(
            expected, [*theirs.parameters()], seed, retain_graph=True
        )
        theirs_grads = dict(zip(dict(theirs.named_parameters()), theirs_grads, strict=True))
        output.backward(seed)
        for parameter in ours.parameters():
            parameter.data = parameter.grad
        other = SelfAttention.from_transformers(theirs)
        other.load_state_dict(theirs_grads)
        for ours_grad, theirs_grad in zip(ours.parameters(), other.parameters(), strict=True):
            assert_close(ours_grad, theirs_grad, rtol=1e-3, atol=1e-4)
        if ours.is_causal:
            cache = other.load_state_dict(theirs.state_dict()) and other.new_cache(2, 16)
            with torch.no_grad():
                found = [other(part, cache=cache) for part in x.split([8, 3, 1, 1], 1)]
            assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma 3"])
def test_bfloat16(name):
    """As near to the truth as transformers' own layer is."""
    model = make(name).bfloat16()
    for theirs, x, rounded in attentions(model, torch.randint(1, 61, (2, 13))):
        ours = SelfAttention.from_transformers(theirs)
        assert ours.qkv_proj.weight.dtype == torch.bfloat16
        truth = SelfAttention.from_transformers(theirs.double())(x.double())
        errors = [(y - truth).square().mean().sqrt().item() for y in (ours(x), rounded)]
        assert errors[0] <= 1.2 * errors[1]


@torch.no_grad()
def test_of_a_model_on_meta():
    """Its weights come later; the frequencies are there."""
    theirs = make("llama").model.layers[0].self_attn
    with torch.device("meta"):
        ours = SelfAttention.from_transformers(make("llama").model.layers[0].self_attn)
    assert ours.o_proj.weight.is_meta
    ours.to_empty(device="cpu").load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, theirs.config.hidden_size)
    assert torch.equal(ours(x), SelfAttention.from_transformers(theirs)(x))


def test_what_is_not_known():
    with pytest.raises(
        ValueError, match="module is Linear, but one of Gemma2Attention, .* expected"
    ):
        SelfAttention.from_transformers(torch.nn.Linear(2, 2))
    MODELS["scaled"] = "Llama", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
    }}  # fmt: skip
    attention = make("scaled").model.layers[0].self_attn
    del MODELS["scaled"]
    with pytest.raises(ValueError, match="rope_parameters is of type 'dynamic', but one that does"):
        SelfAttention.from_transformers(attention)
