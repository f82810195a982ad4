"""One shape made concrete: tensors, and the four calls that are checked and then timed."""

import torch


class Case:
    """forward["qkv"]() and forward["torch"]() return the output, without recording gradients;
    backward["qkv"]() and backward["torch"]() return (grad_query, grad_key, grad_value)."""

    def __init__(self, suite, shape, dtype):
        self.shape = shape
        random = torch.Generator().manual_seed(0)

        def tensor(heads, seqlen, head_dim):
            return torch.randn(shape.batch, heads, seqlen, head_dim, dtype=dtype, generator=random)

        self.inputs = (
            tensor(shape.heads, shape.seqlen_q, shape.head_dim).requires_grad_(),
            tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim).requires_grad_(),
            tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim_v).requires_grad_(),
        )
        self.grad_output = tensor(shape.heads, shape.seqlen_q, shape.head_dim_v)
        calls = {"qkv": suite.qkv, "torch": suite.torch}
        self.forward = {name: self._forward(call) for name, call in calls.items()}
        self.backward = {name: self._backward(call) for name, call in calls.items()}

    def _forward(self, call):
        @torch.no_grad()
        def forward():
            return call(self.shape, *self.inputs)

        return forward

    def _backward(self, call):
        output = call(self.shape, *self.inputs)

        def backward():
            return torch.autograd.grad(output, self.inputs, self.grad_output, retain_graph=True)

        return backward
