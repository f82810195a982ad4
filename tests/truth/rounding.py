"""The same formula with the errors that a kernel may make: the second yardstick of judge.py.

The first yardstick is the formula by torch's operators in the dtype that is computed in. Where
numbers are few its error is a matter of luck, and may be 0; in float64 it always is, since that is
the truth itself. So here each place where a fused kernel rounds differently gets a random error of
the size of one rounding, relative to the terms of the sum, not to the sum:

    dots          |query| . |key|, and |grad_output| . |value| on the way back: in whatever order
                  the products are added up; with int8 keys and half precision, queries are words
    exponentials  themselves; with bfloat16 they are rounded to it as factors
    total         the sum of a row, on the way there and back
    output        itself, rounded to the dtype of the results. The sum of a row that the backward
                  pass takes off, D = grad_output . output, is learned from the rounded output
    gradients of scores, where they become factors; with bfloat16 they are rounded to it
    weights       in derivatives they are made anew from the log-sum-exp, which is rounded: those of
                  a row are all wrong by one factor (docs/semantics.md)
"""

import math

import torch
from formula import Plain


class Average(torch.autograd.Function):
    """kept @ value / total. Its backward pass knows the output only with the given errors, and
    takes the sum of a row from it, as a kernel does that has no weights in memory."""

    @staticmethod
    def forward(ctx, kept, value, total, error, error_of_dots):
        output = (kept @ value) / total * (1 + error)
        ctx.save_for_backward(kept, value, total, error, error_of_dots)
        return output

    @staticmethod
    def backward(ctx, grad):
        kept, value, total, error, error_of_dots = ctx.saved_tensors
        output = Average.apply(kept, value, total, error, error_of_dots)
        scaled = grad / total
        of_total = -(scaled * output).sum(-1, keepdim=True)
        terms = scaled.detach().abs() @ value.detach().abs().mT
        return scaled @ value.mT + error_of_dots * terms, kept.mT @ scaled, of_total, None, None


class OnTheWayBack(torch.autograd.Function):
    """x itself, whose gradient is multiplied by (1 + error)."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.save_for_backward(error)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (error,) = ctx.saved_tensors
        return OnTheWayBack.apply(grad, error) * (1 + error), None


def signed_noise(like, size, generator):
    """Half of `size` to all of it, up or down: enough to change a 1 that it is added to."""
    x = torch.rand(like.shape, generator=generator, dtype=like.dtype) - 0.5
    return size * (x + x.sign() / 2)


class Tanh(torch.autograd.Function):
    """tanh(x), whose derivative 1 - tanh(x)^2 is made of a tanh with the given errors: where it is
    nearly 1, as under a softcap that is far exceeded, the rest has few digits."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.save_for_backward(x, error)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        x, error = ctx.saved_tensors
        t = Tanh.apply(x, error) * (1 + error)
        return grad * (1 - t * t), None


class Nudge:
    """Makes each number of a floating tensor a rounding larger or smaller. What that changes, no
    order of sums and no way to write the formula can spare."""

    def __init__(self, eps, seed):
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def __call__(self, x):
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            return x
        nudged = x * (1 + signed_noise(x, self.eps, self.generator))
        return nudged.where(nudged.isfinite(), x)


# In float32, the weights of these rows are divided by their sum (docs/semantics.md): beyond this
# log-sum-exp, and with no more keys than this.
LARGE_LSE, FEW_KEYS = 128, 11


def as_words(query):
    """Whole numbers of 15 bits, or 14 where there are many, times a power of two for each row: what
    int8 keys are multiplied by in half precision (docs/decoding.md)."""
    bits = 14 if query.size(-1) < 512 else 13
    largest = query.detach().abs().amax(-1, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - bits)
    return torch.where(unit > 0, (query / unit).round() * unit, query)


class Noisy(Plain):
    """dtype: of query. What is random follows from the seed. rounded_lse: the weights of all rows
    are made from an lse that was rounded, also of those that are divided by their sum. words: keys
    are int8."""

    has_errors = True

    def __init__(self, dtype, seed, rounded_lse=False, words=False):
        self.words = words and dtype in (torch.bfloat16, torch.float16)
        self.rounded_lse = rounded_lse or dtype == torch.float64
        self.generator = torch.Generator().manual_seed(seed)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.sums = torch.finfo(compute).eps
        self.factors = torch.finfo(dtype).eps if dtype == torch.bfloat16 else self.sums
        self.results = torch.finfo(dtype).eps

    def random(self, like, size):
        return signed_noise(like, size, self.generator)

    def stored(self, x):
        """What a kernel leaves in memory in between, in the dtype of the results."""
        return x * (1 + self.random(x, self.results))

    def dots(self, query, key):
        dots = (as_words(query) if self.words else query) @ key.mT
        terms = query.detach().abs() @ key.detach().abs().mT
        return dots + self.random(dots, self.sums) * terms

    def tanh(self, x):
        return Tanh.apply(x, self.random(x, self.sums))

    def scores(self, scores):
        scores = scores + self.random(scores, self.sums) * scores.detach()
        return OnTheWayBack.apply(scores, self.random(scores, self.factors))

    def exponentials(self, exponentials):
        exponentials = exponentials * (1 + self.random(exponentials, self.factors))
        return exponentials * (1 + self.row)

    def rows(self, scores, seen, top, sinks):
        """The scores; what is wrong of the weights of a row by one factor comes back with their
        gradients, and reaches the output by exponentials()."""
        self.row = 0.0
        if not self.rounded_lse and scores.size(-1) <= FEW_KEYS:
            return scores
        sums = (scores.detach() - top[..., None]).masked_fill(~seen, -math.inf).exp().sum(-1)
        size = (top + sums.clamp(min=1).log()).abs()
        if not self.rounded_lse:
            size = size.masked_fill(size >= LARGE_LSE, 0)
        self.row = (self.random(size, self.sums) * size).clamp(-0.5, 0.5)[..., None]
        return OnTheWayBack.apply(scores, self.row.expand_as(scores))

    def total(self, total):
        """The sum of a row; its gradient is the sum that the backward pass takes off."""
        total = total * (1 + self.random(total, self.sums))
        return OnTheWayBack.apply(total, self.random(total, self.sums))

    def average(self, exponentials, value, total):
        shape = exponentials.new_empty(*exponentials.shape[:-1], value.size(-1))
        errors = self.random(shape, self.results), self.random(exponentials, self.sums)
        return Average.apply(exponentials, value, total, *errors)
