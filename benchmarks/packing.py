"""How torch's scaled_dot_product_attention computes packed documents and caches, neither of which
it takes on a CPU."""

import torch
import torch.nn.functional as F

from .call import Call
from .torch_ways import additive


def documents(inputs):
    return inputs["cu_seq_q"].diff().tolist()


def padded(inputs, grad_output, dtype):
    """[documents, H, longest, D]; the mask hides the padding."""
    lengths = documents(inputs)

    def pad(x):
        return torch.nn.utils.rnn.pad_sequence(x.detach().split(lengths), True).transpose(1, 2)

    def ours(x):
        return torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)])

    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]
    if inputs["is_causal"]:
        mask = mask & torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
    if dtype != torch.bool:
        mask = additive(mask, dtype)
    tensors = {name: pad(inputs[name]).requires_grad_() for name in ("query", "key", "value")}
    tensors |= {"attn_mask": mask, "enable_gqa": inputs["enable_gqa"]}
    return Call(F.scaled_dot_product_attention, tensors, pad(grad_output), ours)


def padded_bool(inputs, grad_output):
    return padded(inputs, grad_output, torch.bool)


def padded_float(inputs, grad_output):
    return padded(inputs, grad_output, grad_output.dtype)


def each_document(inputs, grad_output):
    lengths = documents(inputs)

    def function(query, key, value, is_causal, enable_gqa, **_):
        outputs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in document),
                is_causal=is_causal, enable_gqa=enable_gqa,
            )
            for document in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]  # fmt: skip
        return torch.cat([x[0].transpose(0, 1) for x in outputs])

    return Call(function, inputs, grad_output)


def cached(inputs, grad_output):
    """torch has no cache; its caller keeps one."""

    def function(query, key, value, seqlen_k, is_causal, enable_gqa):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)

    return Call(function, inputs, grad_output)


def widened(inputs, grad_output):
    """torch's attention takes no int8: its caller makes floating numbers of the cache."""

    def function(query, key, value, k_scale, v_scale, seqlen_k, is_causal, enable_gqa):
        def widen(x, scale):
            return x.to(query.dtype) * scale.unsqueeze(-1).to(query.dtype)

        return F.scaled_dot_product_attention(
            query, widen(key, k_scale), widen(value, v_scale), enable_gqa=enable_gqa
        )

    return Call(function, inputs, grad_output)


def gathered(inputs, grad_output):
    """Pages put in order at every call: at each there is one key more."""

    def function(query, key, value, block_table, seqlen_k, is_causal, enable_gqa):
        def gather(x):
            return x[block_table].transpose(1, 2).flatten(2, 3)[:, :, :seqlen_k]

        return F.scaled_dot_product_attention(
            query, gather(key), gather(value), enable_gqa=enable_gqa
        )

    return Call(function, inputs, grad_output)
