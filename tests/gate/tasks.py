"""Tasks, which are builds and suites, and how they run side by side on the cores that there are."""

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "test-logs"
FAILED_LINES = 60  # of a failed task's log that are printed when it ends


@dataclasses.dataclass(frozen=True)
class Task:
    """command: of bash, in the repository's root. after: names of tasks that it waits for, where
    the layer has them. cores: how many it keeps busy, 0 for all. skip: why it cannot run here, or
    "". is_build: nothing else begins once it has failed."""

    name: str
    command: str
    after: tuple[str, ...] = ()
    cores: int = 0
    skip: str = ""
    is_build: bool = False

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """ended: "passed", "FAILED", "skipped" or "not run". wall, cpu: seconds; cpu is that of all
    processes of the task."""

    task: Task
    ended: str
    wall: float = 0
    cpu: float = 0


def run(tasks: list[Task], say: Callable[[str], None] = print) -> list[Outcome]:
    """Runs each task as soon as the tasks before it have passed and cores are free, earlier ones
    first. Returns their outcomes, in the tasks' order."""
    LOGS.mkdir(parents=True, exist_ok=True)
    named = {task.name for task in tasks}
    waiting = [task for task in tasks if not task.skip]
    outcomes = {task.name: Outcome(task, "skipped") for task in tasks if task.skip}
    running: dict[int, tuple[Task, float, subprocess.Popen]] = {}
    try:
        while waiting or running:
            for task in ready(waiting, running, outcomes, named):
                waiting.remove(task)
                process = start(task)
                running[process.pid] = task, time.monotonic(), process
                say(f"--> {task.name}")
            if not running:  # what still waits does so for something that failed
                break
            pid, status, usage = os.wait4(-1, 0)
            task, began, process = running.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - began, usage.ru_utime + usage.ru_stime
            outcome = Outcome(task, "FAILED" if status else "passed", *seconds)
            outcomes[task.name] = outcome
            say(f"<-- {task.name} {outcome.ended} in {outcome.wall:.0f} s")
            if status:
                say(end_of(task.log))
            if status and task.is_build:
                waiting.clear()
                stop(running)
                running.clear()
    finally:
        stop(running)
    return [outcomes.get(task.name, Outcome(task, "not run")) for task in tasks]


def ready(waiting, running, outcomes, named):
    """The tasks that may begin now. Beside one that keeps all cores busy there is room for one
    more, because none does so from beginning to end; two such tasks at once take turns of so many
    threads that their processor seconds grow by a third (measured on two cores of a Zen 5)."""
    cores = os.cpu_count() or 1
    busy = sum(task.cores or cores for task, *_ in running.values())
    for task in list(waiting):
        before = [outcomes.get(name) for name in task.after if name in named]
        needed = min(task.cores or cores, cores)
        done = all(x and x.ended in ("passed", "skipped") for x in before)
        if done and (not busy or busy + needed <= cores + 1):
            busy += needed
            yield task


def start(task: Task) -> subprocess.Popen:
    # Python keeps what it compiles, whatever it does elsewhere: it starts a hundred times in the
    # quick layer, and each time the sources of torch alone take it two seconds.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PY_COLORS"] = "0"  # which FORCE_COLOR would put into the log that closing.py reads
    with open(task.log, "w") as log:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", task.command], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip


def stop(running) -> None:
    """Ends these tasks with all processes that they started."""
    for _, _, process in running.values():
        try:
            os.killpg(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        process.wait()


def end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    left_out = [f"[{len(lines) - FAILED_LINES} lines before these are in {log}]"]
    return "\n".join((left_out if len(lines) > FAILED_LINES else []) + lines[-FAILED_LINES:])
