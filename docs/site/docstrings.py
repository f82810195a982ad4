"""An extension of Griffe, which reads the docstrings: what ours have that it does not expect."""

import re
from pathlib import Path

import griffe

DOCS = Path(__file__).parents[1]


class Docstrings(griffe.Extension):
    """Examples get its name for the section, and pages that a docstring names become links."""

    def on_object(self, *, obj, **_):
        if obj.docstring is None:
            return
        text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
        text = re.sub(r"docs/([\w-]+\.md)", link, text)
        obj.docstring.value = text


def link(name):
    """To a page that a docstring names, by its title; from docs/reference/."""
    title = re.search(r"^# (.*)", (DOCS / name[1]).read_text(), re.M)[1]
    return f"[{title}](../{name[1]})"
