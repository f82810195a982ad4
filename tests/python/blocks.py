"""A layer of a model, for tests that train one."""

import torch


class Block(torch.nn.Module):
    """attend: qkv.attention, or what stands in for it. `[B, L, 16]` in and out."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.mix = attend, torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
