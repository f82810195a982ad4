"""`python -m benchmarks`, in a checkout: qkv's options, derivatives and caches beside other ways to
the same numbers. Attention without options is `python -m qkv.bench`, which the package brings along
and whose measuring and checking this shares."""
