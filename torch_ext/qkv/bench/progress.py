"""How far a run is, on stderr: a bar that also moves within a step, since a single one of torch's
may take many seconds."""


class Progress:
    """with Progress(steps) as progress: result = progress.step(text, function, *args)"""

    def __init__(self, steps):
        from tqdm import tqdm  # which measuring alone does not need

        self._bar = tqdm(total=steps, bar_format="{desc:<28}{bar} {elapsed}", miniters=0)

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
            self._bar.update(done + min(fraction, 1) - self._bar.n)

        result = function(*args, tick)
        tick(1)
        return result
