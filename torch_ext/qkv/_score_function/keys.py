"""What a function's result follows from beside its arguments, as a key: see `key_of`."""

import functools
import sys
from collections.abc import Sequence
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from qkv._code import words_in

_MOST = 2000  # parts of a key: what is larger takes as long to look up as to trace
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "qkv"})
_PLAIN = frozenset({int, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device})
_BY_IDENTITY = frozenset({OpOverload, OpOverloadPacket, type(str.join)})
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_MISSING = object()


class Unkeyed(Exception):
    """What the function captures has no key, so that it is traced for each call."""


class _Code:
    """A function's text. Two are the same if they are one object."""

    def __init__(self, code: CodeType) -> None:
        self.code = code  # kept, for its id is what it is found by
        self.names = words_in(code)  # of globals and attributes


_codes: dict[int, _Code] = {}


def _code_of(code: CodeType) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) > 4096:  # of code that is made again and again; keys are made anew then
            _codes.clear()
        found = _codes[id(code)] = _Code(code)
    return found


def key_of(function: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    """A key, and the tensors that the function may read.

    In the key are the function's code, its defaults, the values of its closure and of the globals
    and attributes that it names, and so on through functions, `functools.partial`, methods, modules
    and plain objects among them; of a tensor the dtype, the shape and the device. What it reads in
    other ways (a file, a number that another function returns) is not. It keeps no tensor alive.

    Raises:
        Unkeyed: the function captures what has no key, such as an array of numpy.
    """
    walk = _Walk()
    walk(function, _NO_NAMES)
    return tuple(walk.parts), walk.tensors


class _Walk:
    __slots__ = ("numbers", "parts", "seen", "tensors")

    def __init__(self) -> None:
        self.parts: list[Any] = [torch.get_default_dtype()]
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # of tensors
        self.seen: dict[tuple[int, int], tuple[int, Any]] = {}  # by ids, with what has the id

    def __call__(self, x: Any, code: _Code) -> None:
        """code: what reads x, and so which of its attributes count."""
        kind, parts = type(x), self.parts
        if kind in _PLAIN:
            parts += (kind, x)
        elif kind is float:
            parts += (kind, x.hex())  # which tells -0.0 from 0.0, and has one NaN
        elif kind in _BY_IDENTITY:
            parts.append(x)
        elif kind in _TENSORS:
            self.tensor(x, code)
        elif (id(x), id(code)) in self.seen:
            parts += ("again", self.seen[id(x), id(code)][0])
        elif len(parts) + (len(x) if kind in (tuple, list, dict) else 0) > _MOST:
            raise Unkeyed
        else:
            self.seen[id(x), id(code)] = len(self.seen), x
            _WALKS.get(kind, _Walk.other)(self, x, code)

    def tensor(self, x: Tensor, code: _Code) -> None:
        number = self.numbers.setdefault(id(x), len(self.tensors))
        if number < len(self.tensors):  # met before
            self.parts += (Tensor, number)
        else:
            self.tensors.append(x)
            self.parts += (Tensor, x.dtype, x.shape, x.device, x.layout)
        for name in code.names & x.__dict__.keys():  # that the user gave it
            self.parts.append(name)
            self(x.__dict__[name], code)

    def function(self, x: FunctionType, _: _Code) -> None:
        is_foreign = _is_foreign(x.__module__)
        if is_foreign and x.__closure__ is None:
            self.parts.append(x)
            return
        code = _code_of(x.__code__)
        self.parts.append(code)
        for cell in x.__closure__ or ():
            try:
                self(cell.cell_contents, code)
            except ValueError:  # an empty one
                self.parts.append(_MISSING)
        if x.__defaults__ or x.__kwdefaults__:
            self((x.__defaults__, x.__kwdefaults__), code)
        if not is_foreign:
            for name in code.names:
                if name in x.__globals__:
                    self.parts.append(name)
                    self(x.__globals__[name], code)

    def builtin(self, x: Any, code: _Code) -> None:
        """A method of an object of Python's, such as `dict.get`, follows from what is in that."""
        is_function = x.__self__ is None or isinstance(x.__self__, (ModuleType, type))
        self.parts.append(x if is_function else x.__name__)
        if not is_function:
            self(x.__self__, code)

    def partial(self, x: functools.partial[Any], code: _Code) -> None:
        self.parts.append("partial")
        self((x.func, x.args, x.keywords), code)

    def method(self, x: MethodType, code: _Code) -> None:
        function = x.__func__
        self.parts.append("method")
        self(function, code)
        if isinstance(function, FunctionType) and not _is_foreign(function.__module__):
            code = _code_of(function.__code__)
        self(x.__self__, code)

    def sequence(self, x: Sequence[Any], code: _Code) -> None:
        self.parts += (type(x), len(x))
        for y in x:
            self(y, code)

    def module(self, x: ModuleType, code: _Code) -> None:
        self.parts.append(x)
        if not _is_foreign(x.__name__):
            self.attributes(x, x.__dict__, code)

    def dictionary(self, x: dict[Any, Any], code: _Code) -> None:
        self.parts += (dict, len(x))
        for name, value in x.items():
            self(name, code)
            self(value, code)

    def other(self, x: Any, code: _Code) -> None:
        """A subclass of these, a class, or an object, by what the code names of it."""
        kind = type(x)
        if isinstance(x, Tensor):
            return self.tensor(x, code)
        if isinstance(x, (tuple, list)):
            self.sequence(x, code)
            return None if _is_foreign(kind.__module__) else self.attributes(x, {}, code)
        if isinstance(x, ModuleType):
            return self.module(x, code)
        if isinstance(x, (Number, str)):  # such as members of enum and numbers of numpy
            self.parts += (kind, repr(x))
            return None
        if isinstance(x, (set, frozenset)):
            return self.sequence(sorted(x, key=repr), code)
        if isinstance(x, type):
            self.parts.append(x)
            return None if _is_foreign(x.__module__) else self.attributes(x, {}, code)
        state = getattr(x, "__dict__", None)
        is_module = isinstance(x, torch.nn.Module)
        hooks = is_module and (x._forward_hooks or x._forward_pre_hooks)
        if state is None or hooks or isinstance(x, (dict, torch.jit.ScriptModule)):
            raise Unkeyed
        self.parts.append(kind)
        if is_module:
            state = {**x._buffers, **x._parameters, **x._modules, **state}
            # Of a user's module, which may be a whole model, the names in its code count. Torch's
            # code, and that of containers, calls modules that it does not name.
            if _is_foreign(kind.__module__) or hasattr(kind, "__getitem__"):
                self.dictionary(x._modules, code)
        else:
            self.dictionary(state, code)
        self.attributes(x, state, code)
        call = getattr(kind, "forward" if is_module else "__call__", None)
        if isinstance(call, FunctionType):
            if not _is_foreign(call.__module__):
                self(MethodType(call, x), code)
            elif is_module:  # such as ELU, with its alpha
                self.attributes(x, state, _code_of(call.__code__))
        return None

    def attributes(self, x: Any, state: dict[str, Any], code: _Code) -> None:
        of = type(x) if state else x  # a miss of x's is slow
        for name in code.names:
            value = state.get(name, _MISSING)
            if value is _MISSING and hasattr(of, name):
                value = getattr(x, name, _MISSING)
            if value is not _MISSING:
                self.parts.append(name)
                self(value, code)


_WALKS: dict[type, Any] = {
    FunctionType: _Walk.function,
    functools.partial: _Walk.partial,
    MethodType: _Walk.method,
    BuiltinFunctionType: _Walk.builtin,
    ModuleType: _Walk.module,
    dict: _Walk.dictionary,
    tuple: _Walk.sequence,
    list: _Walk.sequence,
}
_NO_NAMES = _Code((lambda: None).__code__)


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN
