"""`python -m benchmarks.ab --against COMMIT`: the same calls on two builds of qkv, turn by turn."""
