"""Ways of libraries that there are not, for the processes of test_bench_peers.py."""

import numpy as np


def half(threads):
    """Whose answer is half of what it should be."""

    def make(tensors, dtype, is_causal):
        from benchmarks.peers import ways

        _, sdpa = ways.sdpa(threads)
        call, read = sdpa(tensors, dtype, is_causal)
        return call, lambda output: read(output) / 2

    return "half 1.0", make


def picky(threads):
    """Which takes no bfloat16."""

    def make(tensors, dtype, is_causal):
        if dtype == "bfloat16":
            raise NotImplementedError("bfloat16, on a Tuesday")
        weights = np.einsum("bhld,bhsd->bhls", *tensors[:2]) / np.sqrt(tensors[0].shape[-1])
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return lambda: weights @ tensors[2], lambda output: output

    return "picky 2.0", make


def missing(threads):
    import no_such_library  # noqa: F401
