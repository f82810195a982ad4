"""Small decoders of transformers, which the tests of register(kernels=True) are about."""

import contextlib
import copy

import torch
import transformers
from torch.testing import assert_close

import qkv.integrations.transformers as integration

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def model_of(family: str):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@contextlib.contextmanager
def counting(monkeypatch, module, name, of):
    """register(kernels=True), and a list of of(the first argument) of each call of module.name."""
    calls, original = [], getattr(module, name)

    def counted(x, *args):
        calls.append(of(x))
        return original(x, *args)

    integration.register(kernels=True)
    monkeypatch.setattr(module, name, counted)
    yield calls
    integration.unregister()
    integration.register()


def check_training(model, calls) -> int:
    """Logits and gradients by qkv are those of the model's own code. Returns how long `calls` is,
    which is empty before qkv's turn."""
    ids = torch.randint(50, (2, 9))
    expected = gradients(copy.deepcopy(model), ids)
    model.set_attn_implementation("qkv")
    calls.clear()
    found = gradients(model, ids)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert_close(found[name], x, atol=1e-5 * max(1, x.abs().max()), rtol=1e-4, msg=name)
    return len(calls)


def gradients(model, ids):
    """The logits, and the gradients of the parameters that have one."""
    model.zero_grad()
    logits = model(ids).logits
    logits.square().sum().backward()
    return {"logits": logits} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }
