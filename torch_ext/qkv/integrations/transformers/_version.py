"""The versions of transformers that the integration knows."""

from importlib.metadata import PackageNotFoundError, version

OLDEST = (5, 22)


def check_version() -> None:
    """Raises ImportError, with the version that is installed, where there is none to work with."""
    needed = ".".join(map(str, OLDEST))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ImportError(
            f"qkv.integrations.transformers needs transformers {needed} or newer, but it is not "
            "installed: pip install 'qkv[transformers]'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"qkv.integrations.transformers needs transformers {needed} or newer, but transformers "
            f"{found} is installed"
        )
