"""A score function that was traced before is known again, and by nothing but what it does."""

import enum
import functools
import gc
import itertools
import math
import sys
import threading
import types
import weakref
from typing import NamedTuple

import numpy
import pytest
import torch
from score_programs import trace
from torch.nn.attention.flex_attention import and_masks

from qkv._score_function import cache
from qkv._score_function.cache import traced
from qkv._score_function.keys import key_of

INF = float("inf")
SCALE = 2.0
SETTINGS = types.ModuleType("settings_of_a_user")
SETTINGS.window = 3
LAZY = type("Lazy", (types.ModuleType,), {})("lazy_module_of_a_user")


def text(score_mod, dtype=torch.float32):
    return trace(score_mod, dtype).text


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(cache, "_known", {})


def is_known(score_mod):
    """Whether it is looked up, rather than traced."""
    before = dict(cache._known)
    found, _ = traced(score_mod, torch.float32)
    return any(x is found for x, _ in before.values())


def capped(cap):
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


class Module(torch.nn.Module):
    def __init__(self, cap=20.0):
        super().__init__()
        self.cap = cap
        self.table = torch.nn.Parameter(torch.randn(3, 40))
        self.register_buffer("ids", torch.arange(7) // 2)

    def score_mod(self, s, b, h, q, k):
        s = self.cap * torch.tanh(s / self.cap) + self.table[h, q - k]
        return torch.where(self.ids[q] == self.ids[k], s, -INF)

    def forward(self, s, b, h, q, k):
        return self.score_mod(s, b, h, q, k) * 2


class Plain:
    def __init__(self, cap):
        self.cap, self.inner = cap, {"window": [1, 2]}

    def __call__(self, s, b, h, q, k):
        return torch.where(q - k < self.inner["window"][1], s * self.cap, -INF)


class Kind(enum.Enum):
    ADD, MULTIPLY = 1, 2


def test_the_same_function_made_again_is_known():
    assert not is_known(capped(20.0))
    assert is_known(capped(20.0)) and is_known(capped(20.0))
    assert not is_known(capped(30.0)) and not is_known(capped(20))
    assert is_known(capped(20.0))


def by_closure(x):
    return lambda s, b, h, q, k: s * x


def by_default(x):
    return lambda s, b, h, q, k, y=x: s * y


def by_keyword(x):
    return lambda s, b, h, q, k, *, y=x: s * y


def by_partial(x):
    return functools.partial(lambda y, s, b, h, q, k: s * y, x)


def by_inner_function(x):
    def inner(y):
        return y * x

    return lambda s, b, h, q, k: inner(s)


def by_nested_code(x):
    return lambda s, b, h, q, k: (lambda: s * x)()


def by_module(x):
    return Module(x).score_mod


def by_callable_module(x):
    return Module(x)


def by_object(x):
    return Plain(x)


def by_list(x):
    numbers = [1, {"a": (x,)}]
    return lambda s, b, h, q, k: s * numbers[1]["a"][0]


class Forwards:
    """As wrappers of modules do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def by_wrapper(x):
    wrapped = Forwards(Plain(x))
    return lambda s, b, h, q, k: s * wrapped.cap


def by_property(x):
    class Made:
        @property
        def abs(self):
            raise RuntimeError

        @property
        def cap(self):
            return x

    made = Made()
    return lambda s, b, h, q, k: s.abs() * made.cap


class MakesWhenAsked:
    """The second one may lie in memory where the first one was."""

    number = [0.0]
    first = property(lambda self: Plain(1.0))
    second = property(lambda self: Plain(MakesWhenAsked.number[0]))


def by_objects_made_when_asked(x):
    MakesWhenAsked.number[0] = x
    made = MakesWhenAsked()
    return lambda s, b, h, q, k: s * made.first.cap * made.second.cap


def by_number_of_numpy(x):
    number = numpy.float32(x)
    return lambda s, b, h, q, k: s * number


def by_decorated(x):
    @functools.lru_cache
    def helper():
        return x

    return lambda s, b, h, q, k: s * helper()


def by_masks_of_torch(x):
    seen = and_masks(lambda b, h, q, k: q - k < x, lambda b, h, q, k: q >= k)
    return lambda s, b, h, q, k: torch.where(seen(b, h, q, k), s, -INF)


def by_lazy_module(x):
    """Of a class of its own, as of packages that import their parts when asked."""
    LAZY.cap = x
    return lambda s, b, h, q, k: s * LAZY.cap


def by_set(x):
    numbers = frozenset({x})
    return lambda s, b, h, q, k: s * sum(numbers)


def by_module_of_torch(x):
    module = torch.nn.ELU(x)
    return lambda s, b, h, q, k: module(s)


def by_container(x):
    modules = torch.nn.ModuleList([torch.nn.Sequential(Scale(x))])
    return lambda s, b, h, q, k: modules[0](s)


class Scale(torch.nn.Module):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def forward(self, s):
        return s * self.x


def by_method_of_dict(x):
    get = {"cap": x}.get
    return lambda s, b, h, q, k: s * get("cap")


def by_attribute_of_tensor(x):
    table = torch.ones(3)
    table.cap = x
    return lambda s, b, h, q, k: s * table[h] * table.cap


class Window(NamedTuple):
    size: int

    def scaled(self, s):
        return s * LAZY.cap


def by_method_of_named_tuple(x):
    LAZY.cap, window = x, Window(3)
    return lambda s, b, h, q, k: window.scaled(s)


class Factor:
    """What Python calls of it has no name in the code."""

    def __init__(self, s=None):
        self.s = s

    def __mul__(self, s):
        return s * LAZY.cap

    def value(self):
        return self.s * LAZY.cap


def by_operator(x):
    LAZY.cap, factor = x, Factor()
    return lambda s, b, h, q, k: factor * s


def by_object_made_inside(x):
    LAZY.cap = x
    return lambda s, b, h, q, k: Factor(s).value()


def by_attribute_of_function(x):
    def scaled(s):
        return s * scaled.cap

    scaled.cap = x
    return lambda s, b, h, q, k: scaled(s)


class Level(enum.IntEnum):
    LOW = 1

    @property
    def cap(self):
        return LAZY.cap


def by_property_of_int_enum(x):
    LAZY.cap, level = x, Level.LOW
    return lambda s, b, h, q, k: s * level.cap


class KindOfCap:
    """A descriptor, which only objects have."""

    def __get__(self, of, kind=None):
        return of.caps[0]


class Described:
    cap = KindOfCap()

    def __init__(self):
        self.kind = "described"

    @property
    def caps(self):
        return LAZY.cap


def by_descriptor(x):
    LAZY.cap, described = [x], Described()
    return lambda s, b, h, q, k: s * described.cap


class Answers:
    def __init__(self):
        self.kind = "answers"

    def __getattr__(self, name):
        if name == "cap":
            return LAZY.cap
        raise AttributeError(name)


def by_answer(x):
    LAZY.cap, answers = x, Answers()
    return lambda s, b, h, q, k: s * answers.cap


def by_parameter_dict(x):
    numbers = torch.nn.ParameterDict({"cap": x})
    return lambda s, b, h, q, k: s * numbers["cap"]


WAYS = [by_closure, by_default, by_keyword, by_partial, by_inner_function, by_nested_code,
        by_module, by_callable_module, by_object, by_list, by_masks_of_torch, by_wrapper,
        by_objects_made_when_asked, by_number_of_numpy, by_decorated,
        by_lazy_module, by_set, by_module_of_torch, by_container, by_method_of_dict,
        by_attribute_of_tensor, by_method_of_named_tuple, by_operator,
        by_attribute_of_function, by_object_made_inside, by_property_of_int_enum, by_descriptor,
        by_answer, by_parameter_dict]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_is_seen(way):
    first, second = text(way(2.0)), text(way(3.0))
    assert first != second and is_known(way(2.0))
    assert text(way(2.0)) == first and text(way(3.0)) == second
    assert not is_known(way(-0.0)) and not is_known(way(0.0)) and not is_known(way(float("nan")))
    assert is_known(way(float("nan")))


def test_globals_and_modules_are_seen(monkeypatch):
    by_global = lambda s, b, h, q, k: s * SCALE  # noqa: E731
    by_attribute = lambda s, b, h, q, k: torch.where(q - k < SETTINGS.window, s, -INF)  # noqa: E731
    before = text(by_global), text(by_attribute)
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    monkeypatch.setattr(SETTINGS, "window", 5)
    assert text(by_global) != before[0] and text(by_attribute) != before[1]


def test_attributes_that_change_are_seen():
    module, plain = Module(), Plain(2.0)
    before = text(module.score_mod), text(plain)
    assert is_known(module.score_mod) and is_known(plain)
    module.cap, plain.inner["window"][1] = 30.0, 9
    assert text(module.score_mod) != before[0] and text(plain) != before[1]
    kind = Kind.ADD

    def by_kind(s, b, h, q, k):
        return s + 1 if kind is Kind.ADD else s * 2

    before = text(by_kind)
    kind = Kind.MULTIPLY
    assert text(by_kind) != before


def test_a_variable_that_has_no_value_yet():
    def score_mod(s, b, h, q, k):
        try:
            return s * factor
        except NameError:
            return s

    before = text(score_mod)
    assert is_known(score_mod)
    factor = 2.0
    assert text(score_mod) != before


def test_values_of_tensors_are_read_for_each_call():
    table, ids = torch.randn(9, requires_grad=True), torch.arange(9)

    def score_mod(s, b, h, q, k):
        return torch.where(ids[q] == ids[k], s + table[q], -INF)

    assert trace(score_mod, torch.float32).indices.tolist() == ids.tolist()
    first = trace(score_mod, torch.float32).indices
    assert trace(score_mod, torch.float32).indices is first  # not converted again
    ids.add_(5)
    with torch.no_grad():
        table.mul_(2)
    program = trace(score_mod, torch.float32)
    assert program.indices.tolist() == ids.tolist() and program.tables.equal(table)
    program.tables.sum().backward()
    assert table.grad.equal(torch.ones(9))
    ids.data = torch.arange(9) * 2
    assert trace(score_mod, torch.float32).indices.tolist() == ids.tolist()
    ids = torch.arange(9).flip(0)
    assert is_known(score_mod) and trace(score_mod, torch.float32).indices[0] == 8
    table = torch.randn(10)
    assert not is_known(score_mod)
    table = torch.randn(10, dtype=torch.float64)
    assert not is_known(score_mod)


def test_which_of_the_tensors_is_seen():
    a, b = torch.randn(5), torch.randn(5)

    def of(x, y):
        return lambda s, b, h, q, k: s + x[q] * y[k]

    assert text(of(a, b)) != text(of(a, a))
    assert trace(of(b, a), torch.float32).tables.equal(torch.cat([b, a]))


def test_what_has_no_key_is_traced_each_time():
    numbers, hidden = numpy.array([2.0]), itertools.repeat(torch.ones(3))
    by_numpy = lambda s, b, h, q, k: s * float(numbers[0])  # noqa: E731
    first = text(by_numpy)
    numbers[0] = 3.0
    assert text(by_numpy) != first and not is_known(by_numpy)
    many = [1.0] * 3000
    by_many = lambda s, b, h, q, k: s * many[-1]  # noqa: E731
    assert not is_known(by_many) and not is_known(by_many)
    first = text(by_property(2.0))  # which has an attribute that raises
    assert text(by_property(3.0)) != first
    scripted = torch.jit.script(Scale(2.0))
    by_script = lambda s, b, h, q, k: scripted(s)  # noqa: E731
    assert not is_known(by_script) and not is_known(by_script)
    by_iterator = lambda s, b, h, q, k: s * next(hidden)[h]  # noqa: E731
    assert not is_known(by_iterator) and not is_known(by_iterator)


class Above(Scale):
    def forward(self, s):
        return super().forward(s) * getattr(self, "larger" if s is None else "factor")


def test_what_is_read_without_its_name_is_seen(monkeypatch):
    """Imports within a function, super, getattr: these, too, are traced each time."""
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    above = Above(2.0)

    def by_import(s, b, h, q, k):
        from settings_of_a_user import window

        return torch.where(q - k < window, s, -INF)

    by_globals = lambda s, b, h, q, k: s * globals()["SCALE"]  # noqa: E731
    by_super = lambda s, b, h, q, k: above(s)  # noqa: E731
    above.factor, before = 1.0, []
    for change in (lambda: None, lambda: setattr(above, "factor", 5.0)):
        change()
        before.append([text(f) for f in (by_import, by_globals, by_super)])
        monkeypatch.setattr(SETTINGS, "window", 7)
        monkeypatch.setitem(globals(), "SCALE", 8.0)
    assert all(old != new for old, new in zip(*before, strict=True))


def test_whether_a_tensor_requires_grad_is_seen():
    table = torch.randn(9)
    score_mod = lambda s, b, h, q, k: s + table[q if table.requires_grad else k]  # noqa: E731
    first = text(score_mod)
    table.requires_grad_()
    assert text(score_mod) != first and "query" in text(score_mod)


def test_integers_that_numpy_writes_are_read_for_each_call():
    numbers = numpy.arange(6)
    ids = torch.from_numpy(numbers)
    score_mod = lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -INF)  # noqa: E731
    for _ in range(2):
        assert trace(score_mod, torch.float32).indices.tolist() == numbers.tolist()
        numbers[3] = 9


def test_keys_tell_dtypes_apart():
    f = capped(2.0)
    default = torch.get_default_dtype()
    text(f)
    assert traced(f, torch.float64)[0] is not traced(f, torch.float32)[0]
    assert traced(f, torch.bfloat16)[0] is traced(f, torch.float32)[0]
    try:
        torch.set_default_dtype(torch.float64)
        assert not is_known(f)
    finally:
        torch.set_default_dtype(default)


def test_it_keeps_no_tensor_and_no_closure_alive():
    def made():
        module, ids, table = Module(), torch.arange(9), torch.randn(9)

        def score_mod(s, b, h, q, k):
            return module.score_mod(s, b, h, q, k) + table[ids[q]]

        trace(score_mod, torch.float32)
        assert is_known(score_mod)
        return [weakref.ref(x) for x in (module, ids, table, score_mod)]

    alive = made()
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_its_size_is_bounded():
    for n in range(cache._MOST + 20):
        traced(capped(float(n + 1)), torch.float32)
    assert len(cache._known) == cache._MOST
    assert is_known(capped(float(n + 1))) and not is_known(capped(1.0))


def test_code_that_is_made_again_is_known():
    made = lambda: eval("lambda s, b, h, q, k: s * 2.0")  # noqa: E731
    assert not is_known(made()) and is_known(made())


def test_threads():
    true = {n: text(capped(float(n + 1))) for n in range(8)}
    wrong = []

    def calls(first):
        for n in range(first, first + 400):
            if text(capped(float(n % 8 + 1))) != true[n % 8]:
                wrong.append(n)

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_integers_of_a_transform_are_not_kept():
    ids = torch.arange(6)
    score_mod = lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -INF)  # noqa: E731

    def f(x):
        return x * trace(score_mod, torch.float32).indices.sum()

    assert torch.func.grad(f)(torch.ones(())) == 15
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert trace(score_mod, torch.float32).indices.shape == (6,)
    with torch.inference_mode():
        trace(score_mod, torch.float32)
    found = trace(score_mod, torch.float32).indices
    assert type(found) is torch.Tensor and not found.is_inference() and found.sum() == 15


def test_numbers_of_a_function_that_is_new_to_a_mode():
    """They are the function's own, and not read by the mode, which may know no numbers."""
    fill = 0.25
    score_mod = lambda s, b, h, q, k: torch.where(q < k, -INF, s * fill)  # noqa: E731
    with torch._subclasses.FakeTensorMode():
        found = trace(score_mod, torch.float32)
    assert found.text == trace(score_mod, torch.float32).text and "0.25" in found.text


def test_a_key_is_small():
    """Of what torch and Python have, no more than a name."""
    score_mod = lambda s, b, h, q, k: torch.nn.functional.silu(s) * math.pi  # noqa: E731
    assert len(key_of(score_mod)[0]) < 16
