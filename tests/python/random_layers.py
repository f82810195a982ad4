"""Layers that write attention out in code that hypothesis draws, a line at a time."""

import functools
import math

import torch
from hypothesis import strategies as st
from torch import nn

HEADS = 3
# What a line of a layer may be. Scores s and weights w are `[B, H, L, S]`, or `[B * H, L, S]` in a
# layer that joins heads, where a line that needs heads stands between two views. No mask hides the
# first key, so that each query sees one: a query that sees none does not get what the layer gives
# in all cases (docs/adopt.md, "a query of which a fill hides all keys").
PRODUCTS = (
    "q @ k.transpose(-1, -2)", "torch.matmul(q, k.mT)", "q.matmul(k.permute(0, 1, 3, 2))",
    'torch.einsum("bhld, bhsd -> bhls", q, k)', "torch.matmul(q / math.sqrt(D), k.mT)",
)  # fmt: skip
JOINED_PRODUCTS = (
    "torch.bmm(q, k.transpose(1, 2))", "q @ k.mT", 'torch.einsum("bld,bsd->bls", q, k)',
    "torch.baddbmm(torch.zeros(1, 1, 1), q, k.mT, beta=0, alpha=0.3)",
    "torch.baddbmm(term.expand(B, H, L, S).reshape(B * H, L, S), q, k.mT, beta=0.5)",
)  # fmt: skip
SCORES = (
    "s = s / math.sqrt(D)", "s *= 0.5", "s.mul_(0.7)", "s = s.div(2.0)", "s = s + 1.5",
    "s = 2 * s", "s = s - 0.3", "s /= 1.7", "s = s.contiguous()", "s = s.to(q)", "s.add_(0.25)",
    "s = s - s.amax(-1, keepdim=True)", "s = s - s.max(-1, keepdim=True)[0].detach()",
    "s = torch.max(s, torch.tensor(torch.finfo(s.dtype).min))",
)  # fmt: skip
SCORES_WITH_HEADS = (
    "s = s + term", "s += term", "s = term + s", "s.add_(term)", "s = s + term[..., :1]",
    "s = s + term[..., :1, :]", "s = s.masked_fill(mask, -math.inf)",
    "s = s.masked_fill(mask, -1e9)", "s.masked_fill_(mask, torch.finfo(s.dtype).min)",
    "s = torch.where(mask, torch.tensor(-1e9), s)", "s = torch.where(~mask, s, -1e30)",
    "s = s.where(~mask, -math.inf)", "s = s.masked_fill(padding, -1e4)",
    "s.masked_fill_(padding, -1e9)", "s = s * (~mask) - 1e9 * mask",
    "s = s + torch.where(mask, -1e9, 0.0)", "s = s * self.number", "s = s / self.number",
    "s = s * self.number.detach()[0, 0, 0]", "s = s + self.learned",
    "s = s + self.learned[None] * 0.5", "s = s * (self.number - 2)",
)  # fmt: skip
# What attention does not do, or what runs the layer's own code.
OTHER_SCORES = (
    "s = -s", "s = s.clamp(-2, 2)", "s = torch.tanh(s)", "s = s.exp().log()", "s = s.add(s)",
    "s = s + s * 0.5", "s = torch.add(s, 0.1, alpha=2)", "s = torch.rsub(s, 1.0)", "s = s.abs()",
    "s = s**1", "s = s.clone()", "s = torch.stack([s, s]).mean(0)", "s.neg_()", "s = s * s",
    "s = s.nan_to_num(0.0)", "s[..., 0] = 0.1", "u = s + 0", "u = s.sum()", "u = s.view(-1)",
    "u = s.unsqueeze(0)", "u = s * 1; u += 1", "u = s.to(s.dtype, copy=True); u += 1", "s *= -0.5",
    "u = s.view(s.shape); u += term.mean()", "u = s.view(s.shape); s *= 0.5; s = u",
    "u = s * 2; s += 1; s = u", "q.mul_(0.5)", "k += 0.1", "term *= 0.5",
)  # fmt: skip
OTHER_SCORES_WITH_HEADS = (
    "with torch.no_grad(): s += term", "s = torch.add(s, term, alpha=2)",
    "s[mask.expand_as(s)] = -1e9", "s = s.masked_fill(padding, -5.0)",
    "s = s * padding.logical_not()", "u = s[:, 0]; u += 1",
    "s = (s.transpose(1, 2) + 0).transpose(1, 2)", "s = s[:, :, :, :] + 0",
    "s = torch.cat([s[..., :1], s[..., 1:]], -1)", "s = s.flatten(0, 1).unflatten(0, (B, H))",
)  # fmt: skip
SOFTMAX = (
    "nn.functional.softmax(s, dim=-1)", "s.softmax(-1)", "torch.softmax(s, s.dim() - 1)",
    "torch.softmax(s, dim=-1, dtype=torch.float64)", "nn.Softmax(dim=-1)(s)",
    "s.softmax(dim=-1).type_as(v)",
)  # fmt: skip
WEIGHTS = (
    "w = nn.functional.dropout(w, 0.0)", "w = nn.functional.dropout(w, 0.5, training=False)",
    "w = w.contiguous()", "w = w.to(v.dtype)", "self.kept = w",
)  # fmt: skip
WEIGHTS_WITH_HEADS = ("w = w.masked_fill(mask, 0.0)", "w = w.masked_fill(padding, 0)")
OTHER_WEIGHTS = (
    "w = w * 0.9", "w = w.clone()", "w = w + 0", "w = w / w.sum(-1, keepdim=True)",
    "u = w.detach()", "w = w.masked_fill(w < 0.1, 0.0)", "w += 0", "u = w.mean()", "w *= 0.5",
    "s += 1",
)  # fmt: skip
OTHER_WEIGHTS_WITH_HEADS = (
    "w = w * (~mask)", "w = torch.where(mask, torch.zeros_like(w), w)", "w = w * self.number",
)  # fmt: skip
OUTPUTS = (
    "w @ v", "torch.matmul(w, v)", "w.matmul(v)", "(v.mT @ w.mT).mT",
    'torch.einsum("bhls,bhsd->bhld", w, v)',
    'torch.einsum("bhls,bhsd->blhd", w, v).transpose(1, 2)',
)  # fmt: skip
JOINED_OUTPUTS = ("torch.bmm(w, v)", "w @ v", 'torch.einsum("bls,bsd->bld", w, v)')
AFTERWARDS = (
    "o = o + w.sum()", "o = o * s.mean()", "w = w + 1", "s.zero_()", "w.mul_(3)", "v = v + 1",
)  # fmt: skip
RETURNED = ("o", "o, w", "o, s", "[o, w.detach()]", "o, w.view(B, H, L, S).mean(1)")


class RandomAttention(nn.Module):
    """lines: of a function of query, key and value, which may use the masks and what is learned."""

    def __init__(self, lines, L, S):
        super().__init__()
        self.number = nn.Parameter(torch.full((HEADS, 1, 1), 1.3))
        self.learned = nn.Parameter(torch.linspace(-1, 1, HEADS * L * S).view(HEADS, L, S))
        text = "\n    ".join(("def body(self, q, k, v, mask, padding, term):", *lines))
        found = {"torch": torch, "nn": nn, "math": math}
        exec(text, found)
        self.body = found["body"]

    def forward(self, q, *args):
        return self.body(self, q, *args)

    def attend(self, query, key, value):
        """Never called. By the names in it, qkv.convert tells a layer that writes attention out."""
        return (query @ key.mT).softmax(-1) @ value


@st.composite
def changes(draw, name, with_heads, plain, others, are_joined, most):
    """Lines that change scores or weights. One in five is among the others."""
    lines = []
    for n in draw(st.lists(st.integers(0, 4), max_size=most)):
        line = draw(st.sampled_from(others if n == 4 else with_heads + plain))
        if are_joined and line not in plain:
            apart, joined = (f"{name} = {name}.view({x}, L, S)" for x in ("B, H", "B * H"))
            lines += [apart, line, joined]
        else:
            lines.append(line)
    return lines


@st.composite
def layers(draw):
    """The lines of a layer; hypothesis takes off what does not matter to a failure."""
    joined = draw(st.booleans())
    of = lambda lines: draw(st.sampled_from(lines))  # noqa: E731
    lines = ["B, H, L, D = q.shape; S = k.shape[2]; q, k = q + 0, k + 0"]
    if joined:
        lines += [f"{x} = {x}.flatten(0, 1)" for x in "qkv"]
    lines.append(f"s = {of(JOINED_PRODUCTS if joined else PRODUCTS)}")
    others = OTHER_SCORES + OTHER_SCORES_WITH_HEADS
    lines += draw(changes("s", SCORES_WITH_HEADS, SCORES, others, joined, 5))
    lines.append(f"w = {of(SOFTMAX)}")
    others = OTHER_WEIGHTS + OTHER_WEIGHTS_WITH_HEADS
    lines += draw(changes("w", WEIGHTS_WITH_HEADS, WEIGHTS, others, joined, 2))
    lines.append(f"o = {of(JOINED_OUTPUTS if joined else OUTPUTS)}")
    lines += ["o = o.view(B, H, L, -1)"] * joined
    lines += draw(st.lists(st.sampled_from(AFTERWARDS), max_size=1))
    return (*lines, f"return {of(RETURNED)}")


def inputs(generator, B, L, S):
    """Query, key, value, two masks that hide what is True, and a term that may hide."""
    normal = functools.partial(torch.randn, generator=generator)
    which, has_mask, hides = torch.randint(6, (3,), generator=generator).tolist()
    sizes = ((B, 1, L, S), (1, 1, 1, S), (L, S))[which % 3]
    mask = torch.rand(sizes, generator=generator) < (0.4 if has_mask else 0)
    padding = torch.rand(B, 1, 1, S, generator=generator) < 0.3
    mask[..., 0], padding[..., 0] = False, False
    term = normal(sizes)
    if hides < 2:
        term = torch.zeros(sizes).masked_fill(mask, (-torch.inf, -1e9)[hides])
    query, key, value = normal(B, HEADS, L, 4), normal(B, HEADS, S, 4), normal(B, HEADS, S, 5)
    return 2 * query, key, value, mask, padding, term
