"""What those who know a library's layers say about one."""

from collections.abc import Callable
from typing import NamedTuple


class Found(NamedTuple):
    """A module that was changed, or an attention that was left as it was."""

    what: str  # what was done, or why nothing was
    undo: Callable[[], object] | None = None  # None: nothing was done
