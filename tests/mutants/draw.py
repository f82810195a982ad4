"""Mutants: one change of one file each, given or drawn at random."""

import dataclasses
import random
import re
import subprocess

# What is exchanged, as (pattern, replacement). Includes, templates and comments are left alone.
CHANGES = [
    (r" < ", " <= "), (r" <= ", " < "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
    (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" && ", " || "), (r" \|\| ", " && "),
    (r"\bstd::min\b", "std::max"), (r"\bstd::max\b", "std::min"), (r"\+= ", "= "),
    (r"\.row\b", ".col"), (r"\.head\b", ".row"), (r"\bkeys\b", "(keys - 1)"),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"\b0\b(?![.x])", "1"), (r"\b1\b(?!\.)", "2"),
]  # fmt: skip
LEFT_ALONE = re.compile(r'^\s*(//|#|template|namespace|using)|operator|constexpr int k|__arm|"')
FOLDERS = ("csrc/drivers", "csrc/kernels", "csrc/repair", "csrc/common", "torch_ext")


@dataclasses.dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str
    at: int = -1  # where `old` begins; -1: it stands once in the file
    tests: str = ""  # of tests/python, to be asked first

    def applied(self, text):
        at = text.index(self.old) if self.at < 0 else self.at
        assert self.at >= 0 or text.count(self.old) == 1, f"{self.file} has several of {self.old}"
        assert text[at:].startswith(self.old), f"{self.file} has changed"
        return text[:at] + self.new + text[at + len(self.old) :]

    @property
    def compiles(self):
        return not self.file.endswith(".py")


def places(text):
    """(where it begins, what stands there, what takes its place) of all changes of a file."""
    at, is_asserted = 0, False
    for line in text.splitlines(keepends=True):
        code = line.split("//")[0]
        is_asserted |= "static_assert" in line  # the compiler says whether it holds
        if not is_asserted and not LEFT_ALONE.search(line):
            for pattern, new in CHANGES:
                for match in re.finditer(pattern, code):
                    yield at + match.start(), match.group(), new
        is_asserted &= not code.rstrip().endswith(");")
        at += len(line)


def drawn(root, count, seed):
    """`count` mutants. Each file has the same chance, so that short ones are tried as well."""
    draw = random.Random(seed)
    listed = subprocess.check_output(["git", "-C", root, "ls-files", *FOLDERS], text=True)
    files = [f for f in listed.split() if f.endswith((".h", ".cpp"))]
    found = []
    while len(found) < count:
        file = draw.choice(files)
        text = (root / file).read_text()
        candidates = [*places(text)]
        if candidates:
            at, old, new = draw.choice(candidates)
            line = text.count("\n", 0, at) + 1
            name = f"{file}:{line} {old.strip()} -> {new.strip()}"
            found.append(Mutant(name, file, old, new, at))
    return found
