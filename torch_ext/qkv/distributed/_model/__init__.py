"""What `python -m qkv.distributed.model` is made of."""
