"""Models of transformers with attn_implementation="flex_attention" train on a CPU."""

import pytest
import torch
import torchvision_operators  # noqa: F401

import qkv

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_with_eager_attention(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    ids = torch.randint(0, 99, (2, 40))
    seen = torch.ones_like(ids)
    seen[1, 30:] = 0

    def step(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        labels = ids.masked_fill(seen == 0, -100)
        loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
        loss.backward()
        return loss, [x.grad.clone() for x in model.parameters()]

    true = step("eager")
    with qkv.replace_flex():
        found = step("flex_attention")
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        step("flex_attention")
