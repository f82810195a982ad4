"""How large the house is beside its budgets (CONTRIBUTING.md, "Budgets"); `make lint` prints it."""

import subprocess
from pathlib import Path

import lizard
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
CPP, PYTHON = ("csrc/", "torch_ext/"), ("torch_ext/qkv/",)
LINES = {"C++ of csrc and torch_ext": (CPP, (".h", ".cpp"), 18_500)}
LINES |= {"Python of the package": (PYTHON, (".py",), 9_000)}
HEADER = 200  # lines
FUNCTION = 60  # lines of code: neither docstring, comments nor what is empty


def files(folders, suffixes):
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", *folders], text=True)
    return [ROOT / name for name in listed.splitlines() if name.endswith(suffixes)]


def count(path):
    return path.read_text().count("\n")


def long_functions(paths):
    """ "file:line name" of those above the budget."""
    for of_file in lizard.analyze_files(map(str, paths)):
        for function in of_file.function_list:
            if function.nloc > FUNCTION:
                path = Path(of_file.filename).relative_to(ROOT)
                yield f"{path}:{function.start_line} {function.name}"


def main():
    rows, found = [], []
    for what, (folders, suffixes, most) in LINES.items():
        rows.append((f"lines of {what}", sum(map(count, files(folders, suffixes))), most))
    headers = [path for path in files(CPP, (".h",)) if count(path) > HEADER]
    rows.append((f"headers above {HEADER} lines", len(headers), 0))
    found += [f"{path.relative_to(ROOT)}: {count(path)} lines" for path in headers]
    functions = [*long_functions(files(CPP, (".h", ".cpp", ".py")))]
    rows.append((f"functions above {FUNCTION} lines of code", len(functions), 0))
    print(tabulate(rows, ("", "is", "budget")))
    print(*found, *functions, sep="\n")


if __name__ == "__main__":
    main()
