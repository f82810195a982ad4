"""What is measured, by name. A new suite is a new entry of SUITES."""

from dataclasses import replace
from functools import partial

import torch

from . import tables
from .case import Case
from .entry import PLAIN, Promise, attention
from .grid import GRID
from .masks import MASKS
from .options import parse
from .run import Suite

# name: spelling, then what is promised: times torch's speed at least, times our own time at most.
TRAINING = {
    "plain": ("2x8x1024x1024x64",),
    "dropout": ("dropout:2x8x1024x1024x64", 5, 1.35),
    "bias": ("bias:2x8x1024x1024x64", 2.5),
    "bias-padded": ("bias-padded:2x8x1024x1024x64", None, 1.1),
    "dv96": ("2x8x1024x1024x64x96", 2.5),
    "dv96-padded": ("plain-padded:2x8x1024x1024x64x96",),
    "padding": ("padding:8x8x1024x1024x64", None, 0.8),
    "mask": ("mask:2x8x1024x1024x64", None, 1.15),
    "softcap": ("softcap:2x8x1024x1024x64", None, 1.3),
    "alibi": ("alibi:2x8x1024x1024x64", None, 1.1),
    "slopes": ("slopes:2x8x1024x1024x64",),
    "sinks": ("sinks:2x8x1024x1024x64", None, 1.1),
    "sinks-key": ("sinks-key:2x8x1024x1024x64",),
    "weights": ("weights:2x8x1024x1024x64", None, 1.25),
    "window8k": ("window:1x8x8192x8192x64c", 8),
    "window8k-cut": ("window-cut:1x8x8192x8192x64c",),
    "window32k": ("growth:1x8x32768x32768x64c", None, 4.4),
    "varlen": ("varlen:64x8x1024x1024x64", 2, 1.25),  # 1 / 0.8: the bound is on speed
    "varlen-each": ("varlen-each:64x8x1024x1024x64",),
}

DECODING = {
    "decode": "cache:8x32/8x1x4096x128",
    "decode-4": "cache:8x32/8x4x4096x128",
    "decode-16": "cache:8x32/8x16x4096x128",
    "decode1": "cache:1x32/8x1x4096x128",
    "one-head": "cache:1x8/1x1x65536x128",
    "ungrouped": "cache:4x8x1x4096x128",
    "paged": "paged:8x32/8x1x4096x128",
    "int8": "int8:8x32/8x1x4096x128",
    "int8-ungrouped": "int8:4x8x1x4096x128",
}

TWICE = ("jvp", "double_backward", "backward_twice")

# name: spelling, then for each direction of TWICE what is promised of it: times torch's speed at
# least, times our own plain pass at most.
DERIVATIVES = {
    "L1024": ("2x8x1024x1024x64", (4, 2.9), (None, 3.4), (2.4, None)),
    "L1024c": ("2x8x1024x1024x64c", (4, 2.9), (None, 3.4), (2.4, None)),
    "L4096": ("2x8x4096x4096x64", (5, 2.9), (None, 3.4), (3.2, None)),
    "L4096c": ("2x8x4096x4096x64c", (5, 2.9), (None, 3.4), (3.2, None)),
    "L16384": ("alone:1x1x16384x16384x64", (None, 2.9), (None, 3.4)),
}


def promises(directions, bounds):
    """{direction: Promise} of (at_least, at_most) for each; of fewer bounds than directions, for
    the first."""
    return {d: Promise(*b) for d, b in zip(directions, bounds, strict=False)}


def named(name, entry, promised=None):
    """The entry by another name, and what is promised of it."""
    return replace(entry, name=name, promised=promised or {})


def parse_training(text):
    found = parse(text)
    if found.how.is_cold:
        raise ValueError(f"'{text}': {found.option} is for --suite decode")
    return found


def parse_derivatives(text):
    found = parse_training(text)
    if found.how.call is not attention:
        raise ValueError(f"'{text}': the derivatives are those of qkv.attention alone")
    return replace(found, how=PLAIN) if found.option == "plain" else found  # SDPA alone has them


def parse_decoding(text):
    found = parse(text, default="cache")
    if not found.how.is_cold:
        raise ValueError(f"'{text}': {found.option} is for another suite")
    return found


SUITES = {
    "grid": GRID,
    "options": Suite(
        "options",
        tuple(
            named(name, parse_training(text), {"both": Promise(*promise)})
            for name, (text, *promise) in TRAINING.items()
        ),
        ("forward", "backward", "both"),
        parse_training,
        tables.of_options,
        Case,
    ),
    "masks": Suite(
        "masks",
        tuple(
            named(name, parse_training(f"{name}:1x8x4096x4096x64"), {"forward": Promise(1)})
            for name in MASKS
        ),
        ("forward", "both"),
        parse_training,
        tables.of_masks,
        Case,
    ),
    "derivatives": Suite(
        "derivatives",
        tuple(
            named(name, parse_derivatives(text), promises(TWICE, bounds))
            for name, (text, *bounds) in DERIVATIVES.items()
        ),
        TWICE,
        parse_derivatives,
        tables.of_derivatives,
        partial(Case, with_tangents=True),
        (torch.float32, torch.bfloat16),
        remembered=("jvp", "backward_twice"),
    ),
    "decode": Suite(
        "decode",
        tuple(named(name, parse_decoding(text)) for name, text in DECODING.items()),
        ("forward",),
        parse_decoding,
        tables.of_decoding,
        partial(Case, with_gradients=False),
        (torch.float32, torch.bfloat16, torch.float16),
        has_peak=False,
    ),
}
