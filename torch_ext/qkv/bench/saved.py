"""Runs that --json has written."""

import json

FIELDS = {"suite", "machine", "peak", "directions", "results", "geometric_mean", "warnings"}


def read(path, suites, option):
    """A run of one of the suites. option: which names the file, for errors. Raises ValueError."""

    def refused(why):
        return ValueError(f"{option}: {path} {why}")

    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise refused("is no JSON, expected a file that --json has written") from None
    if not isinstance(run, dict) or not FIELDS <= set(run):
        raise refused("is no run, expected a file that --json has written") from None
    if run["suite"] not in suites:
        raise refused(f"is a run of '{run['suite']}', expected one of {', '.join(suites)}")
    return run
