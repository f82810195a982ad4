"""The benchmark's shapes, with fewer batches and heads and shorter sequences so that the f64
reference takes little time. Each keeps what sets it apart, and torch's choice of tile sizes."""

import torch

GRID = {  # B, Hq, Hkv, L, S, D, is_causal
    "vit-s": (2, 6, 6, 197, 197, 64, False),
    "bert": (1, 6, 6, 512, 512, 64, False),
    "gpt2": (1, 4, 4, 1024, 1024, 64, True),
    "base": (1, 3, 3, 1024, 1024, 64, False),
    "long": (1, 1, 1, 2048, 2048, 64, True),
    "long1h": (1, 1, 1, 1536, 1536, 64, False),
    "llama": (1, 8, 2, 768, 768, 128, True),
    "sd-unet": (1, 2, 2, 1200, 1200, 40, False),
    "tiny": (64, 4, 4, 16, 16, 32, False),
    "cross": (2, 8, 8, 64, 1500, 64, False),
    "d256": (1, 3, 3, 768, 768, 256, True),
    "decode1": (1, 32, 8, 1, 4096, 128, False),
    "decode": (4, 32, 8, 1, 1024, 128, False),
    "decode-4": (2, 32, 8, 4, 1024, 128, False),
}


def grid_inputs(name, dtype):
    B, Hq, Hkv, L, S, D, is_causal = GRID[name]
    inputs = [torch.randn(B, h, n, D, dtype=dtype) for h, n in [(Hq, L), (Hkv, S), (Hkv, S)]]
    return inputs, {"is_causal": is_causal, "enable_gqa": Hq != Hkv}
