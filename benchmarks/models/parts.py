"""Where the time of a step goes: torch's profiler over one, with names for what its operators are
part of.

Hooks name the layers, and functions are named by what calls them: transformers' interface to
attention, with whatever masks and layouts are made there, and apply_rotary_pos_emb. An operator
belongs to the innermost name that it runs in. A Node of the backward pass belongs where the
operator that made it does, which has the same sequence number."""

import contextlib
import sys
from unittest import mock

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

ATTENTION, LINEAR, NORMS, REST = PARTS = "attention", "linear", "rotation, norms", "rest"
STEP = "the step"


def shares(model, step):
    """{part: of the time of one step}. The rest is whatever has no name, Python among it."""
    with named(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function(STEP):
            step()
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    scopes = {event.id: scope_of(event) for event in events}
    made = {}  # of several operators that have one number, the last made the Node
    for event in events:
        if event.sequence_nr >= 0 and not is_node(scopes[event.id]):
            made[event.sequence_nr] = scopes[event.id]
    [whole] = [event for event in events if event.name == STEP]
    taken = dict.fromkeys(PARTS, 0.0)
    for event in events:
        scope = scopes[event.id]
        scope = made.get(scope.sequence_nr) if scope and is_node(scope) else scope
        taken[scope.name if scope else REST] += event.self_cpu_time_total / whole.cpu_time_total
    taken[REST] = 1 - sum(taken[part] for part in PARTS[:-1])
    return taken


def scope_of(event):
    """The innermost event around it that has the name of a part or is a Node, or None."""
    while event is not None and event.name not in PARTS and not is_node(event):
        event = event.cpu_parent
    return event


def is_node(event):
    return event is not None and event.name.startswith("autograd::engine::evaluate_function")


@contextlib.contextmanager
def named(model):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file = vars(sys.modules[type(model).__module__])
    way = model.config._attn_implementation
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if part := part_of_layer(module):
                enter, leave = around(part)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        if "apply_rotary_pos_emb" in file:
            rotate = record_function(NORMS)(file["apply_rotary_pos_emb"])
            stack.enter_context(mock.patch.dict(file, apply_rotary_pos_emb=rotate))
        ALL_ATTENTION_FUNCTIONS[way] = record_function(ATTENTION)(ALL_ATTENTION_FUNCTIONS[way])
        stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, way)  # of what hides transformers' own
        yield


def part_of_layer(module):
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | Conv1D):
        return LINEAR
    kind = type(module).__name__
    return NORMS if "Norm" in kind or "Rotary" in kind else None


def around(part):
    """A hook before forward and one after it."""
    scopes = []

    def enter(*_):
        scopes.append(record_function(part))
        scopes[-1].__enter__()

    def leave(*_):
        scopes.pop().__exit__(None, None, None)

    return enter, leave
