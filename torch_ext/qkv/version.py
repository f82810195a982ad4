__version__ = "0.1.0"

# The minor versions of torch that the sources are written for and tested with.
TORCH_VERSIONS = ("2.13", "2.14", "2.15")
