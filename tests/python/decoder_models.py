"""Small decoders of transformers, which the tests of register(kernels=True) are about."""

import torch
import transformers

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def model_of(family: str):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def gradients(model, ids):
    """The logits, and the gradients of the parameters that have one."""
    model.zero_grad()
    logits = model(ids).logits
    logits.square().sum().backward()
    return {"logits": logits} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }
