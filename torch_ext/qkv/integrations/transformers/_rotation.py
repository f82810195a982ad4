"""The rotation of query and key in transformers' models, by `qkv.rotate`.

Some two hundred model files have a function `apply_rotary_pos_emb` of their own, most of them the
same chain of elementwise operators. It is replaced in the files of models whose attention is qkv's,
where it does what `qkv.rotate` does: not by what is written there, but by a trial."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv._functional import has_kernels
from qkv._rotate import rotate
from qkv._score_function.tables import Remembered
from qkv._watched import is_watched

_NAME = "apply_rotary_pos_emb"
_ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
replaced: dict[tuple[Any, str], Any] = {}  # what a module or a class had by a name


class _Trial(NamedTuple):
    """What a function was found to do besides rotating whole heads by halves, in float32."""

    partly: bool  # it also rotates a first part of them
    keeps_dtype: bool  # its results have q's dtype, whatever the tables' is


def replace_rotation(module_name: str) -> None:
    """In the module of this name, if it has such a function; once, however often it is called."""
    module = sys.modules.get(module_name)
    function = getattr(module, _NAME, None)
    if isinstance(function, FunctionType) and (module, _NAME) not in replaced:
        found = _trial(function)
        if found is not None:
            replace(module, _NAME, _rotating(function, found))


def replace(owner: Any, name: str, made: Callable[..., Any]) -> None:
    replaced[owner, name] = getattr(owner, name)
    setattr(owner, name, made)


def restore() -> None:
    """Gives every module and class its own function back."""
    while replaced:
        (owner, name), function = replaced.popitem()
        setattr(owner, name, function)


def _trial(function: FunctionType) -> _Trial | None:
    """None if it is another function than that of Llama's files."""
    if list(inspect.signature(function).parameters) != _ARGUMENTS:
        return None
    generator = torch.Generator().manual_seed(0)

    def agrees(columns: int) -> bool:
        q, k, cos, sin = (
            torch.randn(*shape, generator=generator, dtype=torch.float32)
            for shape in ((2, 4, 5, 8), (2, 2, 5, 8), *[(2, 5, columns)] * 2)
        )
        tables = [torch.cat([x, x], -1) for x in (cos, sin)]
        expected = rotate(q, k, cos, sin)
        for dim in (1, 2):
            rows = (x.transpose(1, dim) for x in (q, k))
            try:
                found = function(*rows, *tables, unsqueeze_dim=dim)
            except RuntimeError:
                return False
            pairs = zip(found, expected, strict=True)
            if not all(torch.allclose(x.transpose(1, dim), y, atol=1e-5) for x, y in pairs):
                return False
        return True

    if not agrees(4):
        return None
    half = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    table = torch.ones(1, 1, 8, dtype=torch.float32)
    return _Trial(agrees(2), function(half, half, table, table)[0].dtype == half.dtype)


def _rotating(function: FunctionType, found: _Trial) -> Callable[..., Any]:
    @functools.wraps(function)
    def rotating(q, k=None, cos: Any = None, sin: Any = None, unsqueeze_dim=1):
        # Without a key, as Qwen 4's indexer calls it, there is one result.
        if k is None or not _is_ours(q, k, cos, sin, unsqueeze_dim, found):
            return function(q, k, cos, sin, unsqueeze_dim)
        half, heads = cos.shape[-1] // 2, unsqueeze_dim  # the dimension of heads is 1 or 2
        q, k = (x.transpose(1, heads) for x in (q, k))
        q, k = rotate(q, k, cos[..., :half], sin[..., :half])
        return q.transpose(1, heads), k.transpose(1, heads)

    return rotating


def _is_ours(q, k, cos, sin, unsqueeze_dim, found: _Trial) -> bool:
    # Compilers fuse the chain themselves, and could not ask for the numbers of a table; nor could
    # the transforms of torch.func.
    if is_watched(q, k, cos, sin):
        return False
    width = cos.shape[-1]
    return (
        type(cos) is Tensor
        and has_kernels(q)
        and q.dtype == k.dtype
        and q.dim() == k.dim() == 4
        and cos.dim() == 3
        # The first halves stand for the tables, and would get the gradients of the others, too.
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype
        and (cos.dtype == q.dtype or (found.keeps_dtype and cos.dtype == torch.float32))
        and (width == q.shape[-1] or (found.partly and width < q.shape[-1]))
        and unsqueeze_dim in (1, 2)
        # qkv.rotate broadcasts tables over batch items, and nothing else.
        and all(q.shape[x] == k.shape[x] for x in (0, 3 - unsqueeze_dim, 3))
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[3 - unsqueeze_dim]
        and _every_number_twice(cos, sin)
    )


def _every_number_twice(cos: Tensor, sin: Tensor) -> bool:
    half, tables = cos.shape[-1] // 2, [cos, sin]
    return _last.of(tables, lambda: all(x[..., :half].equal(x[..., half:]) for x in tables))


_last = Remembered()  # of the tables of the last call, which all layers of a model share
