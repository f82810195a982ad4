"""Which models of transformers, timm and diffusers qkv computes as they are: `docs/models.md`."""
