"""A call as text: what is drawn is Python, so that what failed can be printed as it was made."""

import dataclasses
from collections.abc import Callable

import torch

PREAMBLE = """\
import math
import torch
import qkv
from torch.nn.attention.varlen import AuxRequest

def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
"""


@dataclasses.dataclass
class Call:
    """tensors: name -> expression, in order, with the names before it in sight. keywords: options
    that the call has in use; each may be left out, unless it is in `needed`. leaves: of tensors,
    those that get gradients. form: the call, in which {keywords} stands for them; body: lines
    before it, setup: lines before the tensors. results: what it returns, by name; cotangents: those
    of them that are differentiable. order: of derivatives. truth: computes the same by the formula.
    facts: what else the truth has to know. tags: what the numbers are like. check: judges results
    that have no truth, or None."""

    operator: str
    form: str
    results: tuple
    truth: Callable
    tensors: dict = dataclasses.field(default_factory=dict)
    keywords: dict = dataclasses.field(default_factory=dict)
    needed: tuple = ()
    leaves: tuple = ()
    cotangents: tuple = ()
    order: int = 0
    jvp: bool = True
    setup: tuple = ()
    body: tuple = ()
    facts: dict = dataclasses.field(default_factory=dict)
    tags: tuple = ()
    check: Callable | None = None
    dtype: torch.dtype = torch.float32
    composed: bool = False  # second derivatives are torch's, whose bits depend on threads
    torchs: bool = False  # and so are parts of the results

    def source(self):
        """The program that makes the tensors and defines `call`, a function of the leaves."""
        keywords = "".join(f", {n}={x}" for n, x in self.keywords.items())
        lines = [*self.setup, *(f"{n} = {x}" for n, x in self.tensors.items()), ""]
        lines.append(f"def call({', '.join(self.used_leaves())}):")
        if "dropout_p" in self.keywords:
            lines.append(f"    torch.manual_seed({self.facts['manual_seed']})")
        lines += [f"    {line}" for line in self.body]
        lines.append("    return " + self.form.replace("{keywords}", keywords))
        return PREAMBLE + "\n" + "\n".join(lines) + "\n"

    def used_leaves(self):
        return [n for n in self.leaves if n in self.tensors]

    def execute(self):
        """The names that the program defines."""
        names = {}
        exec(compile(self.source(), "<call>", "exec"), names)
        return names

    def arguments(self, names):
        """What the truth is told: tensors and options by name."""
        v = {n: names[n] for n in self.tensors}
        for n, text in self.keywords.items():
            if n not in v:
                v[n] = eval(text, names)
        return v | self.facts

    def without(self, keyword):
        gone = (keyword, f"{keyword}_tangent")
        less = lambda group: {n: x for n, x in group.items() if n not in gone}  # noqa: E731
        tensors, keywords = less(self.tensors), less(self.keywords)
        return dataclasses.replace(self, keywords=keywords, tensors=tensors)


def as_tuple(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)
