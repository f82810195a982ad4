"""`python -m benchmarks.peers`: attention of other libraries for CPUs, beside qkv's."""
