"""The form of what is said about an argument that does not fit."""

from typing import Any, NoReturn

from torch import Tensor


def refuse(
    name: str, found: Any, expected: str, error: type[Exception] = ValueError, function: str = ""
) -> NoReturn:
    """Names the argument, what it was, a shape of a tensor, and what is expected. function: whose
    argument it is, where that is not clear from where the error is raised."""
    found = [*found.shape] if isinstance(found, Tensor) else found
    raise error(f"{function}{': ' if function else ''}{name} is {found}, but {expected}")
