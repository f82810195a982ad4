"""Lets torchvision be imported, which timm needs, and transformers takes where it is there.

PyPI's torchvision is built for CUDA: beside a torch without CUDA it has no operators, and fails
because it misses two of them."""

import importlib.util
import sys

import torch

if importlib.util.find_spec("torchvision"):
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
