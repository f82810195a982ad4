"""What a function's result follows from beside its arguments, as a key: see `key_of`."""

import dis
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
Names = frozenset[str]
# What reads things that the code does not name, so that they are in no key.
_READS_UNNAMED = frozenset(
    "getattr hasattr vars locals globals eval exec __dict__ __import__ import_module super environ "
    "getenv children modules parameters buffers named_children named_modules named_parameters "
    "named_buffers get_submodule get_parameter get_buffer".split()
)
# Of an object that is there already; what __getattr__ gives is asked for by name.
_NOT_OF_CALLS = ("__init__", "__new__", "__repr__", "__getattr__")


class Unkeyed(Exception):
    """What the function captures has no key, so that it is traced for each call."""


@functools.lru_cache(1 << 12)
def _is_open(code: CodeType) -> bool:
    """Whether it reads what it does not name."""
    return not _READS_UNNAMED.isdisjoint(words_in(code)) or _imports(code)


def _imports(code: CodeType) -> bool:
    """Whether a user's module is imported in it: what it takes of that is no global."""
    found = (x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME")
    inside = (x for x in code.co_consts if isinstance(x, CodeType))
    return not all(x and _is_foreign(x) for x in found) or any(map(_imports, inside))


def key_of(function: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    """A key, and the tensors that the function may read.

    In the key are the function's code, its defaults, the values of its closure and of the globals
    and attributes that it names, and so on through functions, `functools.partial`, methods, modules
    and plain objects among them; of a tensor the dtype, the shape and the device. What it reads in
    other ways (a file, a number that another function returns) is not. It keeps no tensor alive.

    Raises:
        Unkeyed: the function captures what has no key, such as an array of numpy, or reads what it
            does not name, as getattr, super and imports do.
    """
    walk = _Walk()
    walk(function, frozenset())
    return tuple(walk.parts), walk.tensors


class _Walk:
    __slots__ = ("numbers", "parts", "seen", "tensors", "whole")

    def __init__(self) -> None:
        self.parts: list[Any] = [torch.get_default_dtype()]
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # of tensors
        self.seen: dict[tuple[int, Names], tuple[int, Any]] = {}  # by ids, with what has the id
        self.whole: set[int] = set()  # ids of what `unnamed` has looked at

    def __call__(self, x: Any, names: Names) -> None:
        """names: in the code that reads x, which of its attributes count."""
        kind, parts = type(x), self.parts
        if kind in _PLAIN:
            parts += (kind, x)
        elif kind is float:
            parts += (kind, x.hex())  # which tells -0.0 from 0.0, and has one NaN
        elif kind in _BY_IDENTITY:
            parts.append(x)
        elif kind in _TENSORS:
            self.tensor(x, names)
        elif (id(x), names) in self.seen:
            parts += ("again", self.seen[id(x), names][0])
        elif len(parts) + (len(x) if kind in (tuple, list, dict) else 0) > _MOST:
            raise Unkeyed
        else:
            self.seen[id(x), names] = len(self.seen), x
            _WALKS.get(kind, _Walk.other)(self, x, names)

    def tensor(self, x: Tensor, names: Names) -> None:
        number = self.numbers.setdefault(id(x), len(self.tensors))
        if number < len(self.tensors):  # met before
            self.parts += (Tensor, number)
        else:
            self.tensors.append(x)
            self.parts += (Tensor, x.dtype, x.shape, x.device, x.layout)
        if "requires_grad" in names:
            self.parts.append(x.requires_grad)
        for name in names & x.__dict__.keys():  # that the user gave it
            self.parts.append(name)
            self(x.__dict__[name], names)

    def function(self, x: FunctionType, reader: Names) -> None:
        is_foreign = _is_foreign(x.__module__)
        if is_foreign and x.__closure__ is None:
            self.parts.append(x)
            return
        if not is_foreign and _is_open(x.__code__):
            raise Unkeyed
        names = words_in(x.__code__)
        self.parts.append(x.__code__)
        for name in reader & x.__dict__.keys():
            self.parts.append(name)
            self(x.__dict__[name], reader)
        for cell in x.__closure__ or ():
            try:
                self(cell.cell_contents, names)
            except ValueError:  # an empty one
                self.parts.append(_MISSING)
        if x.__defaults__ or x.__kwdefaults__:
            self((x.__defaults__, x.__kwdefaults__), names)
        if not is_foreign:
            for name in names:
                if name in x.__globals__:
                    self.parts.append(name)
                    self(x.__globals__[name], names)

    def builtin(self, x: Any, names: Names) -> None:
        """A method of an object of Python's, such as `dict.get`, follows from what is in that."""
        is_function = x.__self__ is None or isinstance(x.__self__, (ModuleType, type))
        self.parts.append(x if is_function else x.__name__)
        if not is_function:
            self(x.__self__, names)

    def partial(self, x: functools.partial[Any], names: Names) -> None:
        self.parts.append("partial")
        self((x.func, x.args, x.keywords), names)

    def method(self, x: MethodType, names: Names) -> None:
        function = x.__func__
        self.parts.append("method")
        self(function, names)
        if isinstance(function, FunctionType) and not _is_foreign(function.__module__):
            names = words_in(function.__code__)
        self(x.__self__, names)

    def sequence(self, x: Sequence[Any], names: Names) -> None:
        self.parts += (type(x), len(x))
        for y in x:
            self(y, names)

    def module(self, x: ModuleType, names: Names) -> None:
        self.parts.append(x)
        if not _is_foreign(x.__name__):
            self.attributes(x, x.__dict__, names)

    def dictionary(self, x: dict[Any, Any], names: Names) -> None:
        self.parts += (dict, len(x))
        for name, value in x.items():
            self(name, names)
            self(value, names)

    def other(self, x: Any, names: Names) -> None:
        """A subclass of these, a class, or an object, by what the code names of it."""
        kind = type(x)
        is_foreign = _is_foreign(kind.__module__)
        if isinstance(x, Tensor) and is_foreign:
            return self.tensor(x, names)
        if isinstance(x, (tuple, list)):
            self.sequence(x, names)
            return None if is_foreign else self.attributes(x, getattr(x, "__dict__", {}), names)
        if isinstance(x, ModuleType):
            return self.module(x, names)
        if isinstance(x, (Number, str)):  # such as members of enum and numbers of numpy
            self.parts += (kind, repr(x))
            return None if is_foreign else self.attributes(x, getattr(x, "__dict__", {}), names)
        if isinstance(x, (set, frozenset)):
            return self.sequence(sorted(x, key=repr), names)
        if isinstance(x, type):
            self.parts.append(x)
            return None if _is_foreign(x.__module__) else self.attributes(x, {}, names)
        state = getattr(x, "__dict__", None)
        is_module = isinstance(x, torch.nn.Module)
        hooks = is_module and (x._forward_hooks or x._forward_pre_hooks)
        if state is None or hooks or isinstance(x, (Tensor, dict, torch.jit.ScriptModule)):
            raise Unkeyed
        self.parts.append(kind)
        if is_module:
            state = {**x._buffers, **x._parameters, **x._modules, **state}
            # Of a user's module, which may be a whole model, the names in its code count. Torch's
            # code, and that of containers, calls modules that it does not name.
            if is_foreign or hasattr(kind, "__getitem__"):
                self.dictionary(x._modules, names)
            if isinstance(x, (torch.nn.ParameterDict, torch.nn.ParameterList)):
                self(list(getattr(x, "items", x.__iter__)()), names)
        else:
            self.dictionary(state, names)
        self.attributes(x, state, names)
        call = getattr(kind, "forward", None) if is_module else None
        if isinstance(call, FunctionType):
            if not _is_foreign(call.__module__):
                self(MethodType(call, x), names)
            else:  # such as ELU, with its alpha
                self.attributes(x, state, words_in(call.__code__))
        return None

    def attributes(self, x: Any, state: dict[str, Any], names: Names) -> None:
        kind = type(x)
        answers = isinstance(getattr(kind, "__getattr__", None), FunctionType)
        is_asked = not state or (answers and not _is_foreign(kind.__getattr__.__module__))
        for name in names:
            value = state.get(name, _MISSING)
            # A miss of x's is slow, so that its class is asked, and for what is no class's own.
            if value is _MISSING and (
                is_asked or hasattr(kind, name) or any(name in vars(base) for base in kind.__mro__)
            ):
                value = getattr(x, name, _MISSING)
            if value is not _MISSING:
                self.parts.append(name)
                self(value, names)
        if not isinstance(x, ModuleType) and id(x) not in self.whole:
            self.whole.add(id(x))
            self.unnamed(x, names)

    def unnamed(self, x: Any, names: Names) -> None:
        """The methods that run without being named, such as `__mul__`; of a class all of them, as
        it may be called."""
        is_class = isinstance(x, type)
        for base in (x if is_class else type(x)).__mro__:
            for name, value in () if _is_foreign(base.__module__) else vars(base).items():
                value = getattr(value, "fget", getattr(value, "__func__", value))
                is_special = name[:2] == "__" and name not in _NOT_OF_CALLS
                if isinstance(value, FunctionType) and (is_class or is_special):
                    self(MethodType(value, x), names)


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


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN
