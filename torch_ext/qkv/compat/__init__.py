"""Functions of other libraries, by their names and with their arguments, computed by qkv."""
