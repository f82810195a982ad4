"""Whether errors are larger than those of torch's operators in the same dtype, on the whole.

In one call the larger error may be a matter of luck, by a factor of ten and more where tensors are
small. Over many calls the mean of the logarithm of ours / theirs is a steady number.
"""

import math
from collections import defaultdict

import torch

LEAST = 30  # ratios; with fewer, nothing is said
ALL = "all"  # the tag that every call has: of a hundred calls, few have another in common
# The geometric mean that is allowed, and the largest and smallest ratio that counts. The noise of
# the mean of `n` logarithms is added: three times their standard deviation / sqrt(n).
TIMES, CLIP = 1.5, 30.0
# Torch's operators keep weight * (change of score - lse'), where ours subtracts lse' * output in
# the end: of changes of scores in the millions, that leaves their rounding (docs/semantics.md).
KNOWN = {("attention_jvp", "scores", "grad value")}


def ratios(workers):
    """{(operator, what, tensor): logarithms of ours / theirs}, of float32."""
    found = defaultdict(list)
    for name, worker in workers.items():
        for call, verdict in worker.verdicts:
            if call.dtype != torch.float32 or "dropout_p" in call.keywords:
                continue
            tiny = 1e-9 * verdict.size
            if verdict.ours > tiny and verdict.theirs > tiny:
                ratio = max(1 / CLIP, min(CLIP, verdict.ours / verdict.theirs))
                for tag in (ALL, *call.tags):
                    found[name, tag, verdict.name].append(math.log(ratio))
    return found


def unfair(workers):
    """A line for each kind of tensor whose errors are larger than torch's."""
    lines = []
    for (name, tag, tensor), logs in sorted(ratios(workers).items()):
        if len(logs) < LEAST or (name, tag, tensor) in KNOWN:
            continue
        mean = sum(logs) / len(logs)
        spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs) / len(logs))
        if mean > math.log(TIMES) + 3 * spread:
            lines.append(
                f"{name}, {tag}: errors of {tensor} are {math.exp(mean):.2f} times those of "
                f"torch's operators, over {len(logs)} calls"
            )
    return lines
