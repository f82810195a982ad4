"""The process of one way: python -m benchmarks.peers.worker MODULE:FUNCTION CPU,...

It has the environment of its library, with numpy and without qkv."""

import importlib
import os
import statistics
import sys
import time

import numpy as np

from ..processes import Failed, serve


class Worker:
    """Its methods are what may be asked for."""

    def __init__(self, way, cpus):
        self._way, self._threads = way, len(cpus)
        os.sched_setaffinity(0, cpus)  # before there are threads: some libraries count CPUs

    def load(self):
        """What the library is, and its version."""
        module, _, name = self._way.partition(":")
        try:
            about, self._make = getattr(importlib.import_module(module), name)(self._threads)
        except ImportError as error:
            raise Failed(str(error)) from None
        return about

    def prepare(self, inputs, output, dtype, is_causal):
        """Makes a call ready, of an .npz with query, key and value, and writes its output."""
        self.__dict__.pop("_call", None)  # before there is another one
        tensors = [*np.load(inputs).values()]
        try:
            self._call, read = self._make(tensors, dtype, is_causal)
            np.save(output, read(self._call()))
        except Exception as error:  # a library has types of its own for what it does not do
            raise Failed(f"{type(error).__name__}: {error}") from None

    def time(self, seconds):
        """Seconds of a call: the median of a turn of about so many, in which the first call wakes
        the threads."""
        begin, taken = time.perf_counter(), []
        self._call()
        while not taken or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            self._call()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)


if __name__ == "__main__":
    serve(Worker(sys.argv[1], [*map(int, sys.argv[2].split(","))]))
