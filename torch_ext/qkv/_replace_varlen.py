"""torch.nn.attention.varlen on CPU tensors, for which torch itself has no kernel.

torch's functions call operators of their own, `torch_attn::_varlen_attn` and its variant with
`out`, which hand everything to CUDA. Here they get kernels for CPU tensors; those of other devices
keep theirs. Arguments are taken by the names in the operator's schema, which changes from one
version of torch to the next."""

from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv._varlen import _varlen_attention

# What both operators have under the same name. is_causal only repeats a window of (-1, 0).
_SAME = {argument.name for argument in _varlen_attention._schema.arguments}
_NOT_NEEDED = {"is_causal", "num_splits"}


class ReplacedVarlen:
    """torch's operators with kernels for CPU tensors, until `undo`."""

    def __init__(self) -> None:
        import torch.nn.attention.varlen  # noqa: F401, which defines them

        self.calls = 0
        self._library = torch.library.Library("torch_attn", "IMPL")
        # Above autograd's kernels, too: gradients, and what is compiled, are those of qkv's own.
        for key in ("CPU", "AutogradCPU"):
            self._library.impl("_varlen_attn", self._attend, key)
            self._library.impl("_varlen_attn_out", self._attend_into, key)

    def undo(self) -> None:
        self._library._destroy()

    def _attend(self, *args: Any) -> tuple[Tensor, ...]:
        return self._results("_varlen_attn", args)

    def _attend_into(self, out: Tensor, *args: Any) -> tuple[Tensor, ...] | Tensor:
        output, *others = self._results("_varlen_attn_out", (out, *args))
        # copy_ would convert and broadcast.
        if out.dtype != output.dtype or out.shape != output.shape:
            found, wanted = (f"{x.dtype}, {[*x.shape]}" for x in (out, output))
            refuse("out", found, f"{wanted} is expected", RuntimeError, "varlen_attn_out")
        out.copy_(output)
        return others[0] if len(others) == 1 else tuple(others)

    def _results(self, name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The output and what torch's operator returns besides: the lse, and in most versions the
        state of random numbers that nobody drew."""
        schema = getattr(torch.ops.torch_attn, name).default._schema
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        given.pop("out", None)
        given = {k: v for k, v in given.items() if v is not None and k not in _NOT_NEEDED}
        if unknown := given.keys() - _SAME:
            raise NotImplementedError(
                f"varlen_attn: {', '.join(sorted(unknown))} of this version of torch cannot be "
                "taken by qkv.replace_sdpa"
            )
        given.setdefault("cu_seq_k", None)
        output, lse = _varlen_attention(**given)
        self.calls += 1
        state = torch.zeros(2, dtype=torch.uint64)
        number = len(schema.returns) + (name == "_varlen_attn_out")
        return (output, lse, state)[:number]
