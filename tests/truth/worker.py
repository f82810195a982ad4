"""Calls of one operator on one instruction set: counted, judged, and printed when they fail."""

import faulthandler
import sys

import judge
from case import Case
from snippet import snippet

import qkv

SECONDS_A_CALL = 300  # a longer one hangs
SNIPPETS = 2  # printed of each operator; of further failures a line is


class Worker:
    """draw: makes a call.Call of a seed. record: told of each call before it is made."""

    def __init__(self, name, draw, isa, record, options):
        self.name, self.draw, self.isa, self.record = name, draw, isa, record
        self.rounded_lse = options.rounded_lse
        self.counts = dict.fromkeys(("held", "failed", "refused"), 0)
        self.verdicts = []

    def round(self, seed, calls):
        for n in range(calls):
            faulthandler.dump_traceback_later(SECONDS_A_CALL, exit=True, file=sys.__stderr__)
            call = self.draw(f"{seed}.{n}")
            self.record(f"{self.name}, call {n} of the round\n{call.source()}")
            outcome = self.outcome(call)
            if isinstance(outcome, judge.Failure):
                self.show(call, outcome)
            faulthandler.cancel_dump_traceback_later()

    def outcome(self, call):
        try:
            verdicts = self.hold(call)
        except judge.Failure as failure:
            self.counts["failed"] += 1
            return failure
        except (RuntimeError, ValueError) as error:
            self.counts["refused"] += 1
            # Where bits are asked for that a call cannot have, it says so.
            expected = qkv.is_reproducible() and isinstance(error, NotImplementedError)
            if self.counts["refused"] <= SNIPPETS and not expected:
                print(f"  {self.name} refused: {error}\n{call.source()}", flush=True)
            return None
        self.counts["held"] += 1
        self.verdicts += [(call, verdict) for verdict in verdicts]
        return None

    def hold(self, call):
        return judge.hold(Case(call), rounded_lse=self.rounded_lse)

    def show(self, call, failure):
        if self.counts["failed"] > SNIPPETS:
            what = f"{str(call.dtype)[6:]}, {', '.join((*call.tags, *call.keywords))}"
            print(f"  {self.name} failed too ({what}): {failure}", flush=True)
            return
        call, failure = self.simplest(call, failure)
        number = sum(self.counts.values())
        print(f"  {self.name} failed, after {number} calls: {failure}", flush=True)
        text = snippet(Case(call).ready(), failure, self.isa)
        print("    " + text.replace("\n", "\n    "), flush=True)

    def simplest(self, call, failure):
        """The call without the options that it fails without, too."""
        for keyword in (n for n in [*call.keywords] if n not in call.needed):
            fewer = call.without(keyword)
            try:
                self.hold(fewer)
            except judge.Failure as same:
                call, failure = fewer, same
            except (RuntimeError, ValueError, KeyError):
                continue
        return call, failure
