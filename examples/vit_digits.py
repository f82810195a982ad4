#!/usr/bin/env python
"""A small vision transformer that learns to read handwritten digits.

It shows qkv.nn.MultiheadAttention in the place of torch's own layer, inside
torch.nn.TransformerEncoderLayer. An image of 8 x 8 pixels is cut into 16 patches. Attention is the
only way from them to the class token, from which the digit is read.

It needs scikit-learn, which ships the 1797 images: `pip install scikit-learn`.

    python examples/vit_digits.py
    python examples/vit_digits.py --attention torch    # the same model on torch's attention
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qkv
from arguments import make_parser

PATCH, PATCHES = 2, 16  # pixels on a patch's side; patches in an image
WIDTH, HEADS, LAYERS, DROPOUT = 64, 4, 2, 0.1
BATCH = 64
TEST_IMAGES = 360


class VisionTransformer(nn.Module):
    """Images [B, 8, 8] in, logits [B, 10] out."""

    def __init__(self, attention: str):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", batch_first=True, norm_first=True
        )
        module = qkv.nn if attention == "qkv" else nn
        layer.self_attn = module.MultiheadAttention(WIDTH, HEADS, DROPOUT, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.to_logits = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # [B, 4, 4, 2, 2]
        tokens = self.embed(patches.flatten(3).flatten(1, 2))  # [B, 16, WIDTH]
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1)
        return self.to_logits(self.norm(self.encoder(tokens + self.position)[:, 0]))


def load_images() -> tuple[Tensor, Tensor]:
    """Images float32 [1797, 8, 8] with pixels from -1 to 1, and their digits [1797]; shuffled, the
    same each time."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float() / 8 - 1
    return images[order], torch.from_numpy(digits.target)[order]


def main(argv: list[str] | None = None) -> float:
    """Returns the share of the test images that are read correctly."""
    parser = make_parser(__doc__, steps=400)
    parser.add_argument("--attention", choices=("qkv", "torch"), default="qkv")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    images, digits = load_images()
    model = VisionTransformer(args.attention)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.steps)
    for step in range(args.steps):
        chosen = torch.randint(TEST_IMAGES, len(images), (BATCH,))
        loss = F.cross_entropy(model(images[chosen]), digits[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")

    with torch.no_grad():
        answers = model.eval()(images[:TEST_IMAGES]).argmax(-1)
    share = (answers == digits[:TEST_IMAGES]).float().mean().item()
    print(f"{share:.1%} of {TEST_IMAGES} images that it was not trained on are read correctly")
    return share


if __name__ == "__main__":
    main()
