"""Score functions of users as programs of instructions (csrc/program): see `trace`."""

from qkv._score_function.program import ScoreProgram
from qkv._score_function.trace import trace

__all__ = ["ScoreProgram", "trace"]
