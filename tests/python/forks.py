"""Processes that have imported torch already: forks of one that did so once for all.

It does nothing else than fork, so that it has started no threads. qkv is loaded by the forks, which
takes 15 ms: in a child of a process that has loaded it attention has one thread. (The server of
forks that multiprocessing has is one a process, and distributed_world.py's.)
"""

import concurrent.futures
import functools
import multiprocessing
import os
import sys
import tempfile

import torch  # noqa: F401  for the forks


def _execute(code, path, env):
    os.environ.update(env)
    with open(path, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def _fork(code, path, env, timeout):
    """_execute() in a fork of this process: its exit code, or None after more than `timeout` s."""
    process = multiprocessing.get_context("fork").Process(target=_execute, args=(code, path, env))
    process.start()
    process.join(timeout)
    exitcode = process.exitcode
    process.kill()
    return exitcode


@functools.cache
def _template():
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def run_forked(code, timeout=120, env=()):
    """run_python of common.py in a fork. It takes 20 ms to start, where importing torch takes a
    second. What is read later than that may be in `env`: QKV_ISA, but not OMP_NUM_THREADS. There is
    memory that was freed before the fork, so that what takes little does not show as growth."""
    with tempfile.NamedTemporaryFile("r") as output:
        exitcode = _template().submit(_fork, code, output.name, dict(env), timeout).result()
        printed = output.read()
    assert exitcode is not None, f"took more than {timeout} s\n{printed}"
    assert exitcode == 0, f"exit code {exitcode}\n{printed}"
    return printed
