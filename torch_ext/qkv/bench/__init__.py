"""`python -m qkv.bench`: qkv's attention beside torch's on this machine. --help says more."""
