"""Compiles a model that contains qkv's operator into a package that run_exported.cpp loads.

    python export_model.py model.pt2 samples.pt

model.pt2: torch's own encoder with attention by qkv, for any batch and any length.
samples.pt: inputs of two sizes with the outputs that torch's attention gives for them.
"""

import sys

import torch
from torch.export import Dim

import qkv

WIDTH, HEADS, LAYERS = 32, 4, 2


def sample(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [B, L, WIDTH] and its padding mask [B, L], which is true behind the end of a row."""
    lengths = torch.randint(1, length + 1, (batch, 1))
    return torch.randn(batch, length, WIDTH), torch.arange(length) >= lengths


@torch.no_grad()
def main(package: str, samples: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()

    # The outputs are torch's, from before the model is converted, so that the C++ program holds
    # qkv against something else than qkv.
    inputs = [sample(2, 9), sample(3, 40)]
    outputs = [model(x, src_key_padding_mask=padding) for x, padding in inputs]
    torch.save([(*x, y) for x, y in zip(inputs, outputs, strict=True)], samples)

    print(qkv.convert(model))
    x, padding = inputs[0]
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    exported = torch.export.export(
        model,
        (x,),
        {"src_key_padding_mask": padding},
        dynamic_shapes={"src": sizes, "src_key_padding_mask": sizes},
    )
    torch._inductor.aoti_compile_and_package(exported, package_path=package)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
