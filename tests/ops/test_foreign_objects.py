"""convert and restore run no code of the objects that they look through, and undo themselves completely."""

import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
import torch.nn.functional as F
import wrapt

import hmpx
from hmpx.base import raw
from hmpx.ops import sweep
from tests.support import python

X = torch.randn(4, 4)
LINEAR = F.linear
pytestmark = pytest.mark.usefixtures("everything_is_looked_through")


class Raising(Exception):
    pass


armed = []


def hostile(base, *names):
    """A subclass whose methods of those names raise while `armed`."""

    def method(name):
        def raises(self, *args, **kwargs):
            if armed:
                raise Raising(name)
            return getattr(super(cls, self), name)(*args, **kwargs)

        return raises

    cls = type(f"Hostile{base.__name__}", (base,), {name: method(name) for name in names})
    return cls


LOOKS = ("__len__", "__iter__", "__eq__", "__hash__", "__getattribute__", "__repr__", "__contains__", "__getitem__")
DICT = hostile(dict, *LOOKS, "values", "items", "keys", "get", "copy", "__setitem__")(linear=F.linear)
ORDERED = hostile(OrderedDict, *LOOKS, "values", "items", "keys", "get", "copy", "__setitem__")(linear=F.linear)
LIST = hostile(list, *LOOKS, "__setitem__", "copy")([F.linear])
DEQUE = hostile(deque, *LOOKS, "__setitem__", "copy")([F.linear])
OBJECT = hostile(object, "__getattribute__", "__setattr__", "__eq__", "__hash__", "__repr__")()
object.__setattr__(OBJECT, "act", F.linear)
KEY = hostile(object, "__eq__", "__hash__", "__repr__")()
KEYED = {KEY: 1, "linear": F.linear, "nothing": {KEY: F.linear}}


class Proxied:
    """`__class__` and `__dict__` are code."""

    @property
    def __class__(self):
        raise Raising("__class__")

    @property
    def __dict__(self):
        raise Raising("__dict__")


PROXIED = object.__new__(Proxied)
object.__setattr__(PROXIED, "act", F.linear)
PROXY = wrapt.ObjectProxy(F.linear)


class Meta(type):
    def __setattr__(cls, name, value):
        raise Raising("__setattr__ of a metaclass")

    def __eq__(cls, other):
        raise Raising("__eq__ of a metaclass")

    def __hash__(cls):
        if armed:
            raise Raising("__hash__ of a metaclass")
        return 1


class Strict(metaclass=Meta):
    act = F.linear


class Lazy(types.ModuleType):
    __all__ = property(lambda self: (_ for _ in ()).throw(Raising("a property of a module")))

    def __getattr__(self, name):
        raise Raising(name)


LAZY = Lazy("lazy")
vars(LAZY)["act"] = F.linear


def reached():
    return [
        *(dict.__getitem__(d, "linear") for d in (DICT, ORDERED, KEYED)),
        list.__getitem__(LIST, 0),
        object.__getattribute__(OBJECT, "act"),
        *(type.__getattribute__(Strict, "act"), types.ModuleType.__getattribute__(LAZY, "act")),
    ]


@pytest.fixture
def code_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "lazy", LAZY)
    armed.append(True)
    yield
    armed.clear()


def test_no_code_of_containers_objects_classes_and_modules_runs(code_raises):
    with hmpx.convert() as handle:
        assert [f(X, X).dtype for f in reached()] == [torch.bfloat16] * 7
        assert any("DEQUE holds linear: a deque is not changed" in line for line in handle.escaped)
        assert any(line.startswith("a Proxied holds linear: its attributes cannot be") for line in handle.escaped)
        assert any("KEYED['nothing'][<Hostileobject>] holds linear: " in line for line in handle.escaped)
    assert all(f is LINEAR for f in reached())


class Value:
    pass


@pytest.mark.slow
def test_dictionaries_that_change_while_they_are_read():
    weak, strong, stop, modules = weakref.WeakValueDictionary(), {"linear": F.linear}, threading.Event(), []
    globals()["CHANGING"] = (weak, strong)

    def change():
        number = 0
        while not stop.is_set():
            number += 1
            value = weak[number] = Value()
            strong[number] = value
            strong.pop(number - 50, None)
            name = f"made_by_a_thread_{number % 50}"
            sys.modules[name] = types.ModuleType(name)
            modules.append(name)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            with hmpx.convert():
                assert strong["linear"](X, X).dtype is torch.bfloat16
            assert strong["linear"] is F.linear
    finally:
        stop.set()
        thread.join()
        del globals()["CHANGING"]
        for name in modules:
            sys.modules.pop(name, None)


class Cyclic:
    def __init__(self, finalized):
        self.finalized, self.own = finalized, self

    def __del__(self):
        self.finalized.append(self)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_finalizer_of_garbage_runs_meanwhile(monkeypatch, enabled):
    finalized, seen, grouped = [], [], sweep.grouped

    def make_garbage():
        Cyclic(finalized)
        _ = [[] for _ in range(10)]  # enough for a collection

    def grouped_amid_garbage(things):
        make_garbage()
        seen.append(len(finalized))
        return grouped(things)

    monkeypatch.setattr(sweep, "grouped", grouped_amid_garbage)
    threshold = gc.get_threshold()
    gc.freeze()
    try:
        gc.set_threshold(1)
        if not enabled:
            gc.disable()
        with hmpx.convert():
            assert seen == [0] and gc.isenabled() is enabled
        make_garbage()
        assert bool(finalized) is enabled
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def test_whatever_ends_the_pass_half_way_everything_is_as_it_was(monkeypatch, untouched):
    before, calls, running = reached(), [], sweep.Sweep._running_functions

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            assert any(capture.rebound for capture in self.captures)
            raise KeyboardInterrupt
        running(self)

    monkeypatch.setattr(sweep.Sweep, "_running_functions", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hmpx.convert()
    monkeypatch.undo()
    assert all(a is b for a, b in zip(reached(), before, strict=True))
    assert not untouched.changed() and len(calls) == 2


def test_an_interrupt_of_the_undo_does_not_stop_it(monkeypatch, untouched):
    handle = hmpx.convert()
    write, calls = raw.ITEM.write, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write(*args)

    (rebinding,) = handle._casts._rebindings
    item = raw.ITEM
    for undo in rebinding._changes._undo[0].function.__self__._undo:
        undo.args = tuple(item._replace(write=interrupted) if each is item else each for each in undo.args)
    with pytest.raises(KeyboardInterrupt):
        hmpx.restore()
    assert calls and all(f is LINEAR for f in reached())
    assert not untouched.changed()


def test_a_model_does_not_live_longer_for_what_it_captured():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act = torch.matmul

    models = [Model()]
    with hmpx.convert():
        assert models[0].act(X, X).dtype is torch.bfloat16
        alive = weakref.ref(models[0])
        models.clear()
        assert alive() is None


def test_what_others_put_in_torchs_place_keeps_its_attributes(monkeypatch):
    """They are read and written under torch's name, and by the patch itself under its own; calls are cast."""
    own_linear, own_mul, own_relu = F.linear, torch.Tensor.mul, torch.relu

    def counted(input, weight, bias=None):
        counted.calls += 1
        return own_linear(input, weight, bias)

    class Patch:
        @staticmethod
        def mul(self, other):
            Patch.mul.calls += 1
            return own_mul(self, other)

    class Counter:
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return own_relu(x)

    counted.calls = Patch.mul.calls = 0
    monkeypatch.setattr(F, "linear", counted)
    monkeypatch.setattr(torch.Tensor, "mul", Patch.mul)
    monkeypatch.setattr(torch, "relu", Counter())
    before = vars(counted).copy()
    with hmpx.convert() as handle:
        assert {F.linear(X, X).dtype, X.mul(X).dtype, torch.relu(X).dtype} == {torch.bfloat16}
        assert (F.linear.calls, counted.calls, torch.Tensor.mul.calls, torch.relu.calls) == (1, 1, 1, 1)
        F.linear.calls = 5
        (said,) = [line for line in handle.escaped if "Counter" in line]
        assert said == "torch.relu is a Counter that somebody has put there, and stays so"
    assert F.linear is counted and vars(counted) == {**before, "calls": 5}


IN_A_NEW_PROCESS = """
import torch, hmpx
own = torch.Tensor.mul
def counted(self, other):
    counted.calls += 1
    return own(self, other)
counted.calls, torch.Tensor.mul = 0, counted
x = torch.ones(2)
with hmpx.convert():
    assert x.mul(x).dtype is torch.bfloat16 and counted.calls == 1
"""


def test_what_others_put_there_before_the_first_conversion_is_cast():
    python.run("-c", IN_A_NEW_PROCESS, check=True)
