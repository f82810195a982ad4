"""`python -m benchmarks`, in a checkout: qkv's options, derivatives and caches beside other ways to
the same numbers, and runs beside earlier ones. Attention without options is `python -m qkv.bench`,
too, which the package brings along and whose shapes and measuring this shares."""
