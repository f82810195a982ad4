"""How far a run is, on stderr: a bar that also moves within a step, since a single one of torch's
may take many seconds. Where tqdm is missing, a line for each step."""

import sys
import time

SECONDS = 0.2  # from one refresh to the next


class Lines:
    """What Progress asks of a tqdm, as plain lines."""

    def __init__(self, total):
        self.total, self.n = total, 0.0

    def set_description_str(self, text):
        print(f"[{self.n + 1:.0f}/{self.total}] {text}", file=sys.stderr, flush=True)

    def refresh(self):
        pass

    def close(self):
        pass


def bar(steps):
    try:
        from tqdm import tqdm
    except ImportError:
        return Lines(steps)
    return tqdm(total=steps, bar_format="{desc:<28}{bar} {elapsed}")


class Progress:
    """with Progress(steps) as progress: result = progress.step(text, function, *args)"""

    def __init__(self, steps):
        self._bar = bar(steps)
        self._shown = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bar.close()

    def step(self, text, function, *args):
        """function(*args)"""
        return self.long_step(text, lambda tick: function(*args))

    def long_step(self, text, function, *args):
        """function(*args, tick): it calls tick(fraction) with how much of it is done, 0 to 1."""
        self._bar.set_description_str(text)
        done = self._bar.n

        def tick(fraction):
            self._bar.n = done + min(fraction, 1)
            if time.perf_counter() > self._shown + SECONDS:
                self._bar.refresh()
                self._shown = time.perf_counter()

        result = function(*args, tick)
        tick(1)
        return result
