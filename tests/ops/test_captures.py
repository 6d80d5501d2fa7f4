"""Names taken before convert are cast too, come back after restore, or are reported."""

from __future__ import annotations

import contextvars
import functools
import subprocess
import sys
import textwrap
import threading
import types
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import matmul, nn
from torch.nn.functional import linear

import hmpx
from hmpx.ops import holders, rebinding
from tests.support import python

X = torch.randn(4, 4)
TABLE = {"linear": F.linear, "other": 1}
BY_KIND = {nn.Linear: F.linear, torch.mm: F.linear, (1, "a"): F.linear}
LIST = [F.linear]
TUPLE = (F.linear,)
SET = {F.linear}


@dataclass(frozen=True)
class Keyed:
    name: str


KEYED = {Keyed("linear"): F.linear}


pytestmark = pytest.mark.usefixtures("everything_is_looked_through")


class Holder:
    attribute = F.linear
    static = staticmethod(F.linear)
    product = property(F.linear)

    def method(self, x, apply=F.linear):
        return apply(x, x)

    def by_keyword(self, x, *, product=torch.matmul):
        return product(x, x)


def closure():
    inner = F.linear
    return lambda x: inner(x, x)


CLOSURE = closure()
CELLS = [types.CellType(F.linear)]


class Slotted:
    __slots__ = ("function",)


def with_attribute():
    return with_attribute.function(X, X)


with_attribute.function = F.linear
DEEP = {"a": {"b": [F.linear]}}
ORDERED = OrderedDict(linear=F.linear)
SLOTTED = Slotted()
SLOTTED.function = F.linear
LAYER = nn.TransformerEncoderLayer(8, 2, activation=torch.matmul)
STATE = Holder()
STATE.act = torch.matmul


class Pair(NamedTuple):
    function: object
    other: int


PAIR = Pair(F.linear, 1)
NESTED = {"pair": [PAIR, (TUPLE, 2)]}
BOUND = (X.exp, torch.Tensor.exp, 3)


def held():
    """The functions of torch that something holds, by what that is."""
    return {
        "a name": linear,
        "a name, of matmul": matmul,
        "a dict": TABLE["linear"],
        "a dict whose keys are classes": BY_KIND[nn.Linear],
        "a list": LIST[0],
        "a class": Holder.attribute,
        "a static method": STATE.static,
        "a default of a method": Holder.method.__defaults__[0],
        "a default by keyword": Holder.by_keyword.__kwdefaults__["product"],
        "a closure": CLOSURE.__closure__[0].cell_contents,
        "containers in one another": DEEP["a"]["b"][0],
        "a subclass of dict": ORDERED["linear"],
        "an attribute of a function": with_attribute.function,
        "a tuple": TUPLE[0],
        "a named tuple": PAIR.function,
        "a tuple in containers": NESTED["pair"][1][0][0],
        "a layer": LAYER.activation,
        "an object": STATE.act,
    }


def test_captured_names_are_cast_and_come_back_or_are_reported():
    before, local, original = held(), F.linear, torch.matmul
    tuples = PAIR, TUPLE, NESTED["pair"][1], BOUND
    overrides = torch.overrides.get_testing_overrides()
    with hmpx.convert() as handle:
        assert {how: function(X, X).dtype for how, function in held().items()} == dict.fromkeys(before, torch.bfloat16)
        assert type(PAIR) is Pair and PAIR.other == 1 and NESTED["pair"][0] is PAIR
        keys = ("TABLE['linear']", "BY_KIND[Linear]", "BY_KIND[<_VariableFunctionsClass.mm>]", "BY_KIND[(1, 'a')]")
        assert {f"{__name__}.{key} holds linear" for key in keys} <= set(handle.rebound)
        escaped = "\n".join(handle.escaped)
        assert f"{__name__}.SET holds linear: a set is not changed" in escaped
        assert "Slotted.function holds linear: a slot is not changed" in escaped
        assert f"{__name__}.CELLS[0] holds linear: a cell is not changed" in escaped
        assert f"{__name__}.Holder.product holds linear: a property is not changed" in escaped
        assert f"{__name__}.KEYED[<Keyed>] holds linear: a Keyed as a key runs code of its own" in escaped
        assert "local variable local of" in escaped and "test_captured_names_are_cast_and_come_back" in escaped
        assert original in torch.overrides.get_testing_overrides() and original in overrides  # torch's own tables
        assert torch.overrides.resolve_name(original) == "torch.matmul"
    after = held()
    assert [how for how, function in before.items() if after[how] is not function] == []
    assert all(a is b for a, b in zip((PAIR, TUPLE, NESTED["pair"][1], BOUND), tuples, strict=True))
    assert linear is local is F.linear and {F.linear} == SET and list(KEYED.values()) == [F.linear]


FAR = {"a": [{"b": [{"c": [F.linear]}]}]}
LONG = {**dict.fromkeys(range(10_001)), "act": F.linear}
GAIN = {torch.matmul: 1.0}
CONTEXT = contextvars.ContextVar("act")
OF_THREAD = threading.local()
OF_THREAD.act = F.linear
MAPPED = map(F.linear, [X], [X])
ARGS = ValueError(F.linear)
GRAPH = torch.fx.symbolic_trace(lambda x: torch.matmul(x, x))


def endless():
    act = F.linear
    while True:
        yield act(X, X)


RUNNING = endless()


def test_whoever_holds_one_where_nothing_is_searched_is_named():
    next(RUNNING)
    contextvars.copy_context().run(lambda: None)
    CONTEXT.set(F.linear)
    inside, matmul = f"{__name__}.", "_VariableFunctionsClass.matmul"
    with hmpx.convert() as handle:
        assert next(MAPPED).dtype is next(RUNNING).dtype is CONTEXT.get()(X, X).dtype is torch.float32
        assert OF_THREAD.act(X, X).dtype is torch.float32
        Holder.late = {"act": next(iter(GAIN))}  # younger than the conversion
        said = {line.partition(":")[0] for line in handle.escaped}
        assert {
            f"a list of {inside}FAR holds linear",
            f"a dict of {inside}LONG holds linear",
            f"a key of {inside}GAIN holds {matmul}",
            "a ContextVar holds linear",
            "a dict of a _local holds linear",
            f"a map of {inside}MAPPED holds linear",
            f"a tuple of {inside}ARGS holds linear",
            f"a Node holds {matmul}",
            "endless, which is suspended holds linear",
            f"{inside}Holder.late['act'] holds {matmul}",
        } <= said
    del Holder.late
    assert handle.escaped  # it goes on to say what was known


def test_nobody_is_named_in_a_program_that_holds_none():
    code = """
        import torch, hmpx
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LSTM(4, 4))
        with hmpx.convert() as handle:
            torch.compile(model, backend="eager")(torch.randn(4, 4))
            model(torch.randn(4, 4))[0].sum().backward()
            assert not handle.escaped, handle.escaped
        """
    done = python.run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_names_taken_during_a_conversion_are_originals_after_it():
    with hmpx.convert():
        from torch.nn.functional import bilinear, conv2d

        kept = {"conv2d": conv2d}
        Holder.taken = conv2d
    assert Holder.taken is F.conv2d and bilinear is not None
    del Holder.taken
    assert kept["conv2d"](torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1)).dtype is torch.float32


class Tables:
    """Of functions, made during a conversion."""

    made: ClassVar[dict] = {}


def test_tables_made_during_a_conversion_have_the_originals_as_keys_after_it():
    kinds = (dict, OrderedDict, functools.partial(defaultdict, int), type("Mine", (dict,), {}))
    with hmpx.convert():
        keys = ["first", F.linear, torch.matmul, (F.linear, torch.float32), frozenset({F.relu}), "last"]
        made = [kind([(key, i) for i, key in enumerate(keys)]) for kind in kinds]
        Tables.made = {"tables": made, "set": {F.linear, 1}, "frozen": frozenset({F.linear, 1})}
        both = {linear: "as it was imported", F.linear: "as it is now"}
        Tables.made["both"] = both
    keys = ["first", F.linear, torch.matmul, (F.linear, torch.float32), frozenset({F.relu}), "last"]
    for table in Tables.made["tables"]:
        assert list(table.items()) == list(zip(keys, range(6), strict=True)) and len(table) == 6
        assert [table[key] for key in keys] == list(range(6))
    assert Tables.made["set"] == Tables.made["frozen"] == {F.linear, 1}
    assert next(iter(both)) is F.linear
    Tables.made = {}


@pytest.mark.slow
def test_torchs_own_modules_hold_no_wrapper_after_they_were_imported_during_a_conversion():
    """Its compiler imports hundreds of them. Per-sample gradients look functions up in a table of such a module."""
    code = """
        import gc, sys, types, torch, hmpx
        linear, x = torch.nn.Linear(4, 3), torch.randn(5, 4)

        def per_sample():
            from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
            linear.weight.grad_sample = linear.bias.grad_sample = None
            call_for_per_sample_grads(linear)(x).sum().backward()
            return linear.weight.grad_sample

        before = set(sys.modules)
        with hmpx.convert():
            compiled = torch.compile(linear, backend="aot_eager")(x)
            assert torch.equal(compiled, linear(x)) and compiled.dtype is torch.bfloat16
            assert torch.allclose(per_sample().float(), x[:, None, :].expand(5, 3, 4), rtol=0.01)
            import torch.ao.quantization.quantize_fx
        names = {name for name in set(sys.modules) - before if name.startswith("torch.")}
        held, seen = [(name, vars(sys.modules[name])) for name in names], set()
        while held:
            where, thing = held.pop()
            if id(thing) not in seen:
                seen.add(id(thing))
                ours = isinstance(thing, types.FunctionType) and "__hmpx_original__" in vars(thing)
                assert not ours, (where, thing)
                if isinstance(thing, (dict, list, tuple, set, frozenset)):
                    held += [(where, each) for each in gc.get_referents(thing) if type(each).__name__ != "module"]
        assert len(names) > 100 and len(seen) > 10_000, (len(names), len(seen))
        assert torch.equal(per_sample(), x[:, None, :].expand(5, 3, 4))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "regions",
    ["hmpx.convert()", "hmpx.convert(dtype_map={torch.float32: torch.bfloat16}), hmpx.record()"],
)
def test_a_device_that_is_asked_for_during_a_conversion_is_the_device(regions):
    """torch looks up once, in a table that it keeps, to which functions `with torch.device(...)` gives a device."""
    code = f"""
        import torch, hmpx

        def devices():
            with torch.device("meta"):
                made = torch.zeros(3), torch.tensor([1.0]), torch.full((2,), 1.0), torch.linspace(0, 1, 3)
                made += torch.randn(2), torch.eye(2), torch.nn.Linear(2, 2).weight
            return {{each.device.type for each in made}}

        with {regions}:
            assert devices() == {{"meta"}}, devices()
            compiled = torch.compile(lambda: torch.ones(3), backend="eager")
            with torch.device("meta"):
                assert compiled().device.type == "meta"
        assert devices() == {{"meta"}}, devices()
        """
    done = python.run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_looked_through_is_reported_and_the_rest_is_rebound(monkeypatch):
    module, plain = holders.Rewriting.module, types.ModuleType("unreadable")
    plain.linear = F.linear

    def look(self, each):
        if each is plain:
            raise ValueError("no such page")
        module(self, each)

    monkeypatch.setattr(holders.Rewriting, "module", look)
    with hmpx.convert() as handle:
        assert "a module holds a function of torch: it could not be looked through: no such page" in handle.escaped
        assert TABLE["linear"](X, X).dtype is torch.bfloat16 and plain.linear(X, X).dtype is torch.float32


def test_bound_methods_of_tensors_are_cast(lists):
    with hmpx.convert(**lists(bf16="exp")):
        taken = {"exp": X.exp}
        Holder.taken = taken
        assert {BOUND[0]().dtype, BOUND[1](X).dtype, taken["exp"]().dtype} == {torch.bfloat16}
    assert torch.equal(taken["exp"](), torch.exp(X)) and taken["exp"].__self__ is X
    assert not hasattr(taken["exp"], "__func__")
    del Holder.taken


class OwnPartial(functools.partial):
    """With attributes."""


def apply(function, x, *, then=None):
    return function(x) if then is None else then(function(x))


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform = functools.partial(torch.matmul, other=X)
        self.nested = functools.partial(apply, functools.partial(apply, torch.exp))

    twice = functools.partialmethod(lambda self, function, x: function(x), torch.exp)


def test_a_partial_is_changed_and_stays_the_same_object(lists):
    module, local, own = Module(), functools.partial(F.linear, bias=None), OwnPartial(apply, torch.exp)
    own.note = "kept"
    keyword = functools.partial(apply, abs, then=torch.exp)
    before = [(p, p.func, p.args, dict(p.keywords)) for p in (module.transform, module.nested, local, own, keyword)]
    inner = module.nested.args[0]
    with hmpx.convert(**lists(bf16="exp matmul linear")) as handle:
        assert torch.exp is not before[3][2][0]  # it is one of those that are replaced
        for result in (
            *(module.transform(X), module.nested(X), module.twice(X)),
            *(local(X, X), own(X), keyword(X)),
        ):
            assert result.dtype is torch.bfloat16
        assert module.nested.args[0] is inner and local.keywords == {"bias": None}
        assert type(own) is OwnPartial and own.note == "kept"
        assert "Module.transform holds " in "\n".join(handle.rebound)
        late = functools.partial(torch.matmul, X)
    for partial, func, args, keywords in before:
        assert partial.func is func and partial.keywords == keywords
        assert all(a is b for a, b in zip(partial.args, args, strict=True))
    assert inner.args == (torch.exp,) and late.func is torch.matmul and own.note == "kept"
    assert {module.twice(X).dtype, module.nested(X).dtype, keyword(X).dtype} == {torch.float32}


TAKEN = {}


@pytest.mark.parametrize("arguments", [{}, {"isVerbose": True, "dtype_map": {torch.float32: torch.bfloat16}}], ids=str)
def test_a_single_name_taken_of_any_wrapper_is_noticed(arguments):
    """Whether somebody has taken one is read off reference counts: none may be off by one."""
    with hmpx.convert(**arguments) as handle:
        wrappers = {id(patch.wrapper): patch for patch in handle.patched}
        TAKEN.update({key: patch.wrapper for key, patch in wrappers.items()})  # each once
        originals = {key: patch.original for key, patch in wrappers.items()}
        del wrappers
    assert len(TAKEN) > 150 and all(TAKEN[key] is original for key, original in originals.items())
    TAKEN.clear()


def test_nothing_is_looked_through_again_where_nobody_has_taken_a_name(monkeypatch):
    def everything(sweep):
        raise AssertionError("a pass")

    with hmpx.convert():
        assert linear(X, X).dtype is torch.bfloat16  # a call leaves no reference behind
        monkeypatch.setattr(rebinding.Sweep, "everything", everything)
    assert linear is F.linear and linear(X, X).dtype is torch.float32


def multiply(x):
    return linear(x, x)


def test_globals_of_functions_that_are_in_no_module_are_cast():
    """As `exec` and cloudpickle make them; those that say that they are torch's or hmpx's stay."""
    functions = []
    for name in ({}, {"__name__": "__main__"}, {"__name__": "torch.fake"}, {"__name__": "hmpx.fake"}):
        made = {**name}
        exec("from torch.nn.functional import linear\ndef multiply(x): return linear(x, x)", made)
        sent = types.FunctionType(multiply.__code__, {**name, "linear": F.linear})
        functions += [(name, sent), (name, made.pop("multiply"))]
        del made
    with hmpx.convert():
        for name, function in functions:
            mine = name.get("__name__", "") in ("", "__main__")
            assert function(X).dtype is (torch.bfloat16 if mine else torch.float32), name
    assert {function(X).dtype for _, function in functions} == {torch.float32}
    assert all(function.__globals__["linear"] is F.linear for _, function in functions)


def test_code_without_functions_that_runs_in_no_module_is_cast():
    namespace = {"X": X}
    code = "from torch.nn.functional import linear\nimport hmpx\nwith hmpx.convert():\n    y = linear(X, X)\n"
    exec(code, namespace)
    assert namespace["y"].dtype is torch.bfloat16 and namespace["linear"] is F.linear


def test_a_partial_that_a_table_of_torchs_leads_to_stays(monkeypatch):
    table = {"ours": [functools.partial(F.linear, bias=None)]}
    monkeypatch.setattr(torch.overrides, "table", table, raising=False)
    held = table["ours"][0]
    local = functools.partial(F.linear, bias=None)
    with hmpx.convert():
        assert (held(X, X).dtype, local(X, X).dtype) == (torch.float32, torch.bfloat16)
    assert held.func is local.func is F.linear
