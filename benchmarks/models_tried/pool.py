"""Each family in a process of its own, so that one that crashes or hangs ends nothing else."""

import importlib.metadata
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python"))
import torch  # noqa: E402
import torchvision_operators  # noqa: E402, F401  # before transformers and timm
import transformers  # noqa: E402

import qkv.integrations.transformers  # noqa: E402
from qkv._conversion import scores  # noqa: E402

from . import elsewhere, families  # noqa: E402
from .judge import judge  # noqa: E402

scores.SMALL = 0  # what these models write out is small, and is to be qkv's
_fork = multiprocessing.get_context("fork")  # which has all that was imported


def names() -> list[str]:
    return families.names() + elsewhere.names()


def tried(name: str) -> dict[str, Any]:
    """What becomes of a family: see `judge`; "not built" where there is no model to judge."""
    build = elsewhere.build if ":" in name else families.build
    try:
        model, call = build(name)
    except families.NotBuilt as error:
        return {"outcome": "not built", "why": str(error)}
    found = judge(model, call) | {"model": type(model).__name__, "call": sorted(call)}
    return found


def _child(name: str, pipe: Connection) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    os.dup2(silent, 1)
    try:
        found = tried(name)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{families.said(error)} in {Path(where.filename).name}:{where.lineno}"
        found = {"outcome": "not built", "why": why}
    pipe.send(found)
    pipe.close()


def about() -> dict[str, str]:
    """The versions of what families are tried with."""
    versions = {x: importlib.metadata.version(x) for x in ("transformers", "timm", "diffusers")}
    return versions | {"torch": torch.__version__, "isa": qkv.active_isa()}


def run(
    todo: list[str], jobs: int, timeout: float, seconds: float | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What became of each family, as soon as it is known."""
    torch.set_num_threads(1)  # also what makes it safe to fork
    transformers.logging.set_verbosity_error()
    qkv.integrations.transformers.register()  # imported once, for all
    began = time.monotonic()
    waiting, running = list(todo), {}
    while waiting or running:
        late = seconds is not None and time.monotonic() - began > seconds
        while waiting and not late and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_child, args=(name, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic()
        if late:
            waiting = []
        wait(list(running), timeout=1)
        for pipe, (name, process, since) in list(running.items()):
            took = time.monotonic() - since
            if pipe.poll():
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    why = f"its process ended with {process.exitcode}"
                    found = {"outcome": "crashed", "why": why}
            elif took > timeout:
                process.kill()
                found = {"outcome": "not done", "why": f"not done in {timeout:.0f} s"}
            else:
                continue
            process.join()
            del running[pipe]
            yield name, found | {"seconds": round(took, 1)}
