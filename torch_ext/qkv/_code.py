"""What the code of a class names, followed from its methods to the functions that they call."""

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def defined_in(base: type) -> Iterator[FunctionType]:
    """The methods in the body of a class, without the wrappers of decorators. Those of torch and
    of `PreTrainedModel` say nothing about attention; `_init_weights` names modules to compare."""
    if not base.__module__.startswith(("torch.", "transformers.modeling_utils")):
        for name, thing in vars(base).items():
            function = _unwrapped(getattr(thing, "__func__", getattr(thing, "fget", thing)))
            if isinstance(function, FunctionType) and name != "_init_weights":
                yield function


def methods_of(module: type) -> list[FunctionType]:
    """What an object of the class runs: of methods that override each other the first, and those
    behind it as long as they call super()."""
    found: list[FunctionType] = []
    done: set[str] = set()
    for base in module.__mro__:
        here = [f for f in defined_in(base) if f.__name__ not in done]
        found += here
        done |= {f.__name__ for f in here if "super" not in f.__code__.co_names}
    return found


def reached_from(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """The functions, and those of the same module that they call."""
    found = list(dict.fromkeys(functions))
    for function in found:
        named = {x for x in things_in(function) if isinstance(x, FunctionType)}
        found += [x for x in named if x.__module__ == function.__module__ and x not in found]
    return found


def things_in(function: FunctionType) -> Iterator[Any]:
    """What the global names in a function stand for, and those of modules; what is in lists and
    dicts of that name."""
    words = words_in(function.__code__)
    named = [function.__globals__.get(word) for word in words]
    modules = {id(x): vars(x) for x in named if isinstance(x, ModuleType)}.values()
    for thing in named + [names[word] for names in modules for word in words & names.keys()]:
        several = tuple(thing.values()) if isinstance(thing, dict) else thing
        for one in several if isinstance(several, (list, tuple)) else (several,):
            yield _unwrapped(one)


@functools.lru_cache(1 << 14)  # not more, since a program may make new functions all the time
def words_in(code: CodeType) -> frozenset[str]:
    """The names in the code of a function and of those inside it."""
    inside = (x for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*map(words_in, inside))


def names_in(functions: Iterable[FunctionType]) -> set[str]:
    """The names in the functions and in those that they call."""
    return {name for f in reached_from(functions) for name in words_in(f.__code__)}


def _unwrapped(thing: Any) -> Any:
    return inspect.unwrap(thing) if isinstance(thing, FunctionType) else thing
