"""What each chapter of the tour hands to the page."""

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure


@dataclass
class Chapter:
    """The page's template names facts and pictures by their keys; each picture is a PNG, too."""

    facts: dict[str, Any]
    pictures: dict[str, Figure] = field(default_factory=dict)
