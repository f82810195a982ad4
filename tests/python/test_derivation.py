"""The formulas of docs/report.md, as they stand there, against torch's autograd."""

import pytest
import torch

from qkv import testing

B, H, D, DV = 2, 3, 4, 3
DROPOUT_P, SEED = 0.3, 11


class Formulas:
    """docs/report.md in float64. Inputs, directions and gradients are dictionaries of tensors
    by the names of `qkv.attention`'s arguments; every tensor has the shape that it would be
    broadcast to, but slopes and sinks, which are [H]."""

    def __init__(self, inputs, *, softcap=0.0, dropout=False, **positions):
        self.x = inputs
        self.scale = D**-0.5
        self.softcap = softcap
        L, S = inputs["query"].size(-2), inputs["key"].size(-2)
        self.dist = testing.distance(L, S).double()
        self.seen = testing.visible(L, S, **positions)
        self.K = torch.ones(B, H, L, S, dtype=torch.float64)
        if dropout:
            keep = testing.dropout_mask(SEED, DROPOUT_P, (B, H, L, S))
            self.K = keep.double() / (1 - DROPOUT_P)
        self.forward()

    def cap(self, u):
        """cap, cap' and cap''"""
        if not self.softcap:
            return u, torch.ones_like(u), torch.zeros_like(u)
        x = (u / self.softcap).tanh()
        return self.softcap * x, 1 - x**2, -2 * x * (1 - x**2) / self.softcap

    def per_head(self, name, of):
        """Slopes and sinks as [H, 1, 1]; 0 without."""
        return of[name][:, None, None] if name in of else torch.zeros(H, 1, 1).double()

    def masks(self, of):
        return sum(of[name] for name in ("attn_mask", "bias") if name in of)

    def forward(self):
        x = self.x
        self.u = self.scale * x["query"] @ x["key"].mT
        capped, self.cap1, self.cap2 = self.cap(self.u)
        s = capped - self.per_head("alibi_slopes", x) * self.dist + self.masks(x)
        s = s.masked_fill(~self.seen, -torch.inf)
        if "sinks" in x:
            sink = self.per_head("sinks", x).expand(*s.shape[:-1], 1)
        else:
            sink = torch.full_like(s[..., :1], -torch.inf)
        lse = torch.cat((s, sink), -1).logsumexp(-1, keepdim=True)
        nothing = lse == -torch.inf
        self.P = (s - lse).exp().masked_fill(nothing, 0)
        self.P0 = (sink - lse).exp().masked_fill(nothing, 0)
        self.o, self.lse = self.K * self.P @ x["value"], lse.squeeze(-1)

    def first(self, do, dl):
        """The gradients of <do, o> + <dl, lse>."""
        x = self.x
        self.g = self.K * (do @ x["value"].mT)
        self.D = (do * self.o).sum(-1, keepdim=True)
        self.E = self.D - dl[..., None]
        self.W = self.P * (self.g - self.E)
        self.w = self.cap1 * self.W
        return self.of_scores(self.W) | {
            "query": self.scale * self.w @ x["key"],
            "key": self.scale * self.w.mT @ x["query"],
            "value": (self.K * self.P).mT @ do,
            "sinks": -(self.P0 * self.E).sum((0, 2, 3)),
        }

    def of_scores(self, W):
        """What gets the gradient of the scores as it is, or times distances."""
        slopes = -(W * self.dist).sum((0, 2, 3))
        return {"attn_mask": W, "bias": W, "alibi_slopes": slopes}

    def pass_1(self, t):
        """The tangents of o and lse in the direction t."""
        x = self.x
        self.udot = self.scale * (t["query"] @ x["key"].mT + x["query"] @ t["key"].mT)
        self.T = (
            self.cap1 * self.udot - self.per_head("alibi_slopes", t) * self.dist + self.masks(t)
        )
        self.ts = self.per_head("sinks", t)
        self.mu = (self.P * self.T).sum(-1, keepdim=True) + self.P0 * self.ts
        KP = self.K * self.P
        self.odot = KP @ t["value"] + (KP * self.T) @ x["value"] - self.mu * self.o
        return self.odot, self.mu.squeeze(-1)

    def pass_2(self, t, do):
        """The gradients of <t, first(do, dl)> with respect to inputs; after first and pass_1."""
        x = self.x
        P_dot = self.P * (self.T - self.mu)
        g_dot = self.K * (do @ t["value"].mT)
        E_dot = (do * self.odot).sum(-1, keepdim=True)
        W_dot = P_dot * (self.g - self.E) + self.P * (g_dot - E_dot)
        w_dot = self.cap1 * W_dot + self.cap2 * self.udot * self.W
        return self.of_scores(W_dot) | {
            "query": self.scale * (w_dot @ x["key"] + self.w @ t["key"]),
            "key": self.scale * (w_dot.mT @ x["query"] + self.w.mT @ t["query"]),
            "value": (self.K * P_dot).mT @ do,
            "sinks": -(self.P0 * ((self.ts - self.mu) * self.E + E_dot)).sum((0, 2, 3)),
        }


def shapes(L, S):
    return {
        "query": (B, H, L, D),
        "key": (B, H, S, D),
        "value": (B, H, S, DV),
        "attn_mask": (B, H, L, S),
        "bias": (B, H, L, S),
        "alibi_slopes": (H,),
        "sinks": (H,),
    }


QKV = ("query", "key", "value")
EVERY = tuple(shapes(5, 6))
# The inputs that there are; options; L and S. Where L > S and the window ends at a row's own key,
# the first rows see nothing.
CASES = {
    "plain": (QKV, {}, (5, 6)),
    "causal": (QKV, {"is_causal": True}, (5, 6)),
    "window": (QKV, {"window_size": (2, 1)}, (5, 6)),
    "rows that see nothing": (QKV, {"window_size": (-1, 0)}, (7, 4)),
    "rows that see a sink": ((*QKV, "sinks"), {"window_size": (-1, 0)}, (7, 4)),
    "softcap": (QKV, {"softcap": 0.7}, (5, 6)),
    "mask": ((*QKV, "attn_mask"), {}, (5, 6)),
    "bias": ((*QKV, "bias"), {}, (5, 6)),
    "slopes": ((*QKV, "alibi_slopes"), {}, (5, 6)),
    "sinks": ((*QKV, "sinks"), {"is_causal": True}, (5, 6)),
    "dropout": (QKV, {"dropout": True}, (5, 6)),
    "all": (
        EVERY,
        {"softcap": 0.7, "dropout": True, "is_causal": True, "window_size": (3, 0)},
        (7, 6),
    ),
}


def reference(inputs, *, dropout=False, **options):
    """(o, lse), with 0 for an lse of -inf, which has no derivative."""
    if dropout:
        options |= {"dropout_p": DROPOUT_P, "dropout_seed": SEED}
    output, lse = testing.attention(**inputs, **options, return_lse=True)
    return output, lse.masked_fill(lse == -torch.inf, 0)


@pytest.fixture(params=CASES)
def case(request):
    """(formulas, the reference as a function of the inputs, inputs, directions, do, dl)"""
    names, options, (L, S) = CASES[request.param]
    inputs, directions = (
        {name: torch.randn(shapes(L, S)[name], dtype=torch.float64) for name in names}
        for _ in range(2)
    )
    gradients = [torch.randn(B, H, L, *rest, dtype=torch.float64) for rest in ((DV,), ())]
    return (
        Formulas(inputs, **options),
        lambda *x: reference(dict(zip(names, x, strict=True)), **options),
        inputs,
        directions,
        *gradients,
    )


def assert_same(actual, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-11)


def test_the_first_derivative(case):
    formulas, function, inputs, _, do, dl = case
    _, vjp = torch.func.vjp(function, *inputs.values())
    assert_same(formulas.first(do, dl), dict(zip(inputs, vjp((do, dl)), strict=True)))


def test_the_derivative_in_a_direction(case):
    formulas, function, inputs, t, _, _ = case
    _, tangents = torch.func.jvp(function, tuple(inputs.values()), tuple(t.values()))
    torch.testing.assert_close(formulas.pass_1(t), tangents, rtol=1e-9, atol=1e-11)


def test_the_second_derivative(case):
    """Of F = <t, the first derivatives>, with respect to the inputs, do and dl."""
    formulas, function, inputs, t, do, dl = case
    leaves = [x.clone().requires_grad_() for x in (*inputs.values(), do, dl)]
    *arguments, do_, dl_ = leaves
    first = torch.autograd.grad(function(*arguments), arguments, (do_, dl_), create_graph=True)
    F = sum((x * y).sum() for x, y in zip(first, t.values(), strict=True))
    *second, to_do, to_dl = torch.autograd.grad(F, leaves)
    formulas.first(do, dl)
    odot, mu = formulas.pass_1(t)
    assert_same(formulas.pass_2(t, do), dict(zip(inputs, second, strict=True)))
    assert_same({"do": odot, "dl": mu}, {"do": to_do, "dl": to_dl})


def test_the_backward_pass_of_a_derivative_in_a_direction(case):
    """Pass 2 for the inputs, and the first derivative for the directions."""
    formulas, function, inputs, t, do, dl = case
    leaves = [x.clone().requires_grad_() for x in (*inputs.values(), *t.values())]
    points, directions = tuple(leaves[: len(inputs)]), tuple(leaves[len(inputs) :])
    _, tangents = torch.func.jvp(function, points, directions)
    found = torch.autograd.grad(tangents, leaves, (do, dl))
    first = formulas.first(do, dl)
    formulas.pass_1(t)
    assert_same(formulas.pass_2(t, do), dict(zip(inputs, found[: len(inputs)], strict=True)))
    assert_same(first, dict(zip(t, found[len(inputs) :], strict=True)))
