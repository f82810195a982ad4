"""`qkv.convert`: the attention of a model that exists."""
