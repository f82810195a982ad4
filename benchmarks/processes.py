"""Processes that take turns: each answers what it is asked, a line of JSON each way, and sleeps
while another one computes. An environment that has neither torch nor qkv can run this file."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Threads of OpenMP, TBB and the like spin for some milliseconds after their work, before they
# sleep: none of them does so any more when another process begins.
PAUSE_SECONDS = 0.05


class Failed(Exception):
    """Why a process has no answer, such as a wrong answer or a call that a build has not."""


class Process:
    """name: for errors; command: a module of this checkout that ends in serve(), and its
    arguments."""

    def __init__(self, name, command, environment, python=sys.executable):
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", *command], cwd=ROOT, text=True, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, *request):
        """A method of what serve() was given and its arguments; returns its result. Raises
        Failed."""
        self.send(*request)
        return self.reply()

    def send(self, *request):
        with contextlib.suppress(BrokenPipeError):  # reply() says that it has ended
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def reply(self):
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise Failed(f"{self.name}: its process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(f"{self.name}: {reply['error']}")
        return reply["result"]

    def end(self):
        self._process.kill()
        self._process.communicate()


def serve(worker):
    """The other end: calls the methods of `worker` that are asked for, until nobody asks."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no reply
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            reply = {"result": getattr(worker, name)(*arguments)}
        except Failed as error:
            reply = {"error": str(error)}
        except Exception as error:  # such as an option that this build has not
            reply = {"error": f"{name} {' '.join(map(str, arguments))}: {error!r}"}
        time.sleep(PAUSE_SECONDS)
        print(json.dumps(reply), file=replies, flush=True)
