"""What `python -m benchmarks.distribution` is made of."""
