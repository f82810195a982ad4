"""The arguments of ring_attention, and what they have to be before anything is sent."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv._score_function.arguments import keywords_of_program
from qkv.distributed._block import OPTION_TENSORS, has_rows
from qkv.distributed._ranks import Team
from qkv.distributed._shards import check_dense, length_of
from qkv.options import BY_HEAD, MASKS, defaults
from qkv.spans import tensor_of

_forward = torch.ops.qkv.attention_forward.default
METHODS = ("ring", "heads", "auto")
_DEFAULTS = defaults(torch.ops.qkv.attention.default)
SCALARS = {n: x for n, x in _DEFAULTS.items() if n not in OPTION_TENSORS}
# What the numbers among them are, so that ranks that say 1 and 1.0 say the same.
_KINDS = {
    "dropout_p": float, "is_causal": bool, "scale": float, "enable_gqa": bool, "softcap": float,
    "window_size": lambda sides: tuple(map(int, sides)),
}  # fmt: skip


class Call:
    """inputs: query, key and value, which are `[H, L_local, D]` where there are documents. tensors:
    of OPTION_TENSORS, those that are given. scalars: the other options of qkv.attention, and
    score_program. seqlen: as it was given; an int, once `check` has been there. lead: `[..., H]` of
    the output, from then on."""

    def __init__(
        self, inputs: dict[str, Tensor], seqlen: Any, cu_seqlens: Tensor | None, method: str,
        score_mod: Callable[..., Any] | None = None, **options: Any,
    ):  # fmt: skip
        self.inputs, self.seqlen, self.cu_seqlens = inputs, seqlen, cu_seqlens
        self.method, self.score_mod = method, score_mod
        self.tensors = {n: x for n in OPTION_TENSORS if (x := options.pop(n, None)) is not None}
        self.scalars = SCALARS | options
        self.lead: tuple[int, ...] = ()

    @property
    def heads(self) -> int:
        return self.lead[-1] if self.lead else 1

    @property
    def masks(self) -> list[Tensor]:
        return [self.tensors[name] for name in MASKS if name in self.tensors]

    @property
    def with_rows(self) -> dict[str, Tensor]:
        """The masks that have a row for each query, and not one for all."""
        return {n: x for n, x in self.tensors.items() if n in MASKS and has_rows(x)}


def prepare(call: Call) -> None:
    """The tensor of spans; what score_mod does; under autocast, tensors of its dtype, as
    qkv.attention has them; documents without a dimension for a batch.

    Raises:
        TypeError, RuntimeError: what should be a tensor here and is none. What score_mod raises.
    """
    if "spans" in call.tensors:
        call.tensors["spans"] = tensor_of(call.tensors["spans"])
    for name, tensor in (call.inputs | call.tensors).items():
        check_dense(name, tensor)
        if tensor.device.type != "cpu":
            refuse(name, f"on {tensor.device}", "a tensor on the CPU is expected", RuntimeError)
    if call.score_mod is not None:
        tables = keywords_of_program(call.score_mod, call.inputs["query"])
        call.scalars["score_program"] = tables.pop("score_program")
        call.tensors |= {name: x for name, x in tables.items() if x is not None}
    tensors = call.inputs | call.tensors
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        for name in tensors.keys() & {*call.inputs, "attn_mask"}:
            if tensors[name].is_floating_point() and tensors[name].dtype != torch.float64:
                tensors[name] = tensors[name].to(dtype)
    if call.cu_seqlens is not None:
        for name in tensors.keys() - set(BY_HEAD):
            if tensors[name].dim() == 4 and tensors[name].size(0) == 1:
                tensors[name] = tensors[name][0]
    call.inputs = {name: tensors.pop(name) for name in call.inputs}
    call.tensors = tensors


def check(call: Call, team: Team) -> None:
    """Raises RuntimeError, ValueError or TypeError for the first argument that does not fit."""
    _check_rows(call)
    rows = call.inputs["query"].size(-2)
    seqlen = call.seqlen = length_of("query", rows, call.seqlen, team)
    if call.cu_seqlens is not None:
        _check_documents(call, seqlen)
    if call.method not in METHODS:
        refuse("method", repr(call.method), f"one of {METHODS} is expected")
    call.lead = _leading(call, seqlen)
    if "spans" in call.tensors:
        begins, ends = call.tensors["spans"].unflatten(-1, (-1, 2)).unbind(-1)
        wrong = (begins < 0) | (begins > ends) | (ends > seqlen)
        if wrong.any():
            raise ValueError(
                f"spans has the span from {begins[wrong][0]} to {ends[wrong][0]}, but 0 <= begin "
                f"<= end <= {seqlen} is expected, the length of the sequence"
            )
    for name, kind in _KINDS.items():  # by now numbers, where they are given
        if call.scalars[name] is not None:
            call.scalars[name] = kind(call.scalars[name])
    by_heads = team.heads if team.heads.size > 1 else team.ring
    if call.method == "heads" and team.heads.size > 1 and team.ring.size > 1:
        raise ValueError(
            'method is "heads" with a mesh of two dimensions, which cuts heads and rows; "ring" or '
            '"auto" is expected'
        )
    if team.heads.size > 1 or call.method == "heads":
        if (why := why_not_by_heads(call, by_heads.size)) is not None:
            raise ValueError(why)


def _check_rows(call: Call) -> None:
    query = call.inputs["query"]
    for name, tensor in call.inputs.items():
        if tensor.dim() < 2:
            refuse(name, tensor, "[..., H, L_local, D] is expected")
        if call.cu_seqlens is not None and tensor.dim() != 3:
            wanted = "[H, L_local, D] or [1, H, L_local, D] is expected with cu_seqlens"
            refuse(name, tensor, wanted)
        if tensor.size(-2) != query.size(-2):
            raise ValueError(
                f"{name} has {tensor.size(-2)} rows, but {query.size(-2)} are expected, as many as "
                "query has: they are shards of one sequence"
            )


def _check_documents(call: Call, seqlen: int) -> None:
    ends = call.cu_seqlens
    if not isinstance(ends, Tensor) or ends.dtype not in (torch.int32, torch.int64):
        found = ends.dtype if isinstance(ends, Tensor) else repr(ends)
        refuse("cu_seqlens", found, "a tensor of int32 or int64 is expected", TypeError)
    if ends.device.type != "cpu":
        wanted = "a tensor on the CPU is expected"
        refuse("cu_seqlens", f"on {ends.device}", wanted, RuntimeError)
    if ends.dim() != 1 or ends.numel() == 0:
        refuse("cu_seqlens", ends, "[N + 1] is expected")
    numbers = ends.tolist()
    if numbers[0] < 0 or numbers[-1] > seqlen or (ends.diff() < 0).any():
        wanted = f"numbers from 0 to the length of the sequence, {seqlen}, that do not fall are"
        refuse("cu_seqlens", numbers if len(numbers) < 10 else "...", f"{wanted} expected")


def _leading(call: Call, seqlen: int) -> tuple[int, ...]:
    """What the operator has to say about these shapes, dtypes and numbers: as if all keys were
    here."""
    tensors = {n: torch.empty_like(x, device="meta") for n, x in call.tensors.items()}
    for name in BY_HEAD:
        tensor = tensors.get(name)
        if tensor is not None and call.cu_seqlens is not None and tensor.dim() == 2:
            documents = call.cu_seqlens.numel() - 1
            if tensor.size(0) not in (1, documents):
                wanted = f"[H] or [{documents}, H] is expected, a row for each document of"
                refuse(name, tensor, f"{wanted} cu_seqlens")
            tensors[name] = tensor.new_empty(tensor.size(1))
    for name, x in call.inputs.items():
        rows = x.size(-2) if name == "query" else seqlen
        tensors[name] = x.new_empty(*x.shape[:-2], rows, x.size(-1), device="meta")
    _, lse = _forward(
        **dict.fromkeys(OPTION_TENSORS) | tensors,
        dropout_seed=torch.empty(1, dtype=torch.int64, device="meta"),
        cu_seq_q=None, cu_seq_k=None, seqused_k=None, **call.scalars,
    )  # fmt: skip
    return tuple(lse.shape[:-1])


def why_not_by_heads(call: Call, size: int) -> str | None:
    """Why heads cannot be divided among `size` ranks, if they cannot."""
    if call.heads % size:
        wanted = f"a multiple of {size} is expected, a part for each rank"
        return f"query has {call.heads} heads, but {wanted}"
    for name in ("key", "value"):
        own = call.inputs[name].size(-3) if call.inputs[name].dim() > 2 else 1
        if not own or (own % size and size % own):
            return (
                f"{name} has {own} heads, but a multiple or a divisor of {size} is expected, the "
                "number of ranks that divide the heads"
            )
    return None
