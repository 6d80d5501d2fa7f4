"""Tensors of a class that overrides torch's functions, and nested ones."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import hmpx
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.same import same
from tests.support.spanning import spanning
from tests.support.tensor_classes import (
    Asks,
    ByImport,
    Forgetful,
    KnowsLinear,
    RoundsByTable,
    RoundsWeights,
    by_name,
    quarters,
)

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")


def under_autocast(call):
    with torch.autocast("cpu", BF16):
        return call()


def under_lists(call):
    with hmpx.convert(**AUTOCAST_LISTS):
        return call()


class Plain(torch.Tensor):
    """A class that overrides nothing in a way of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("kind", "backend"), [("nested", "aot_eager"), ("plain", "eager")])
def test_whole_graphs_of_tensors_of_a_class(kind, backend):
    weight, parts = torch.randn(16, 16), [torch.randn(3, 16), torch.randn(2, 16)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged) if kind == "nested" else parts[0].as_subclass(Plain)

    def forward(x):
        return torch.relu(F.linear(x, weight))

    with hmpx.convert(**AUTOCAST_LISTS):
        compiled = torch.compile(forward, backend=backend, fullgraph=True)(x)
        assert type(compiled) is type(x) and same(compiled.unbind(), forward(x).unbind())
        assert compiled.dtype is BF16


@pytest.mark.parametrize("region", [hmpx.enable_casts, hmpx.disable_casts])
def test_a_causal_bias_masks(region):
    """It breaks the graph in compiled code: Dynamo would take the comparison for another one, and lose the mask."""
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    masks = [bias(4, 6) for bias in (causal_lower_right, causal_upper_left)]

    def attend(query, masks=masks):
        return [F.scaled_dot_product_attention(query * 1, key, key, attn_mask=mask) * 1 for mask in masks]

    expected = under_autocast(lambda: attend(query)) if region is hmpx.enable_casts else attend(query)
    with hmpx.convert(**AUTOCAST_LISTS), region():
        assert same(attend(query), expected)
        assert same(torch.compile(attend, backend="eager")(query), expected)
        assert not any(torch.equal(each, attend(query, [None])[0]) for each in expected)


NESTED = {
    "linear": lambda n, w: F.linear(n, w),
    "relu": lambda n, w: torch.relu(F.linear(n, w)),
    "softmax": lambda n, w: torch.softmax(n, -1),
    "x * x": lambda n, w: n * n,
    "attention": lambda n, w: F.scaled_dot_product_attention(*[n.unflatten(-1, (2, 8)).transpose(1, 2)] * 3),
}


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_cast_as_under_autocast(layout):
    parts, weight = [torch.randn(3, 16), torch.randn(2, 16)], torch.randn(16, 16)
    ops = [op for op in NESTED if (op, layout) != ("attention", torch.strided)]  # torch has no such thing

    def computed(way):
        leaves = {op: [part.clone().requires_grad_() for part in parts] for op in ops}
        nested = {op: torch.nested.as_nested_tensor(leaves[op], layout=layout) for op in ops}
        found = way(lambda: {op: NESTED[op](nested[op], weight).unbind() for op in ops})
        for out in found.values():
            sum(each.float().square().sum() for each in out).backward()
        return {op: [*found[op], *(leaf.grad for leaf in leaves[op])] for op in ops}

    ours, expected = computed(under_lists), computed(under_autocast)
    for op in ops:
        assert same(ours[op], expected[op]), op


def handed_linear(cls):
    cls.recognised.clear()
    F.linear(torch.randn(2, 3).as_subclass(cls), torch.randn(3, 3))
    return "linear" in cls.recognised


def classes():
    """A class for each way of asking for a function, made now."""
    table = {F.linear: "linear"}

    class InTable(Asks):
        @classmethod
        def recognises(cls, func):
            return func in table

    class OfClass(Asks):
        functions = (F.linear, F.relu)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func not in cls.functions:
                return super().__torch_function__(func, types, args, kwargs)
            cls.recognised.append(func.__name__)
            return args[0]

    class OfEachClass(Asks):
        functions: ClassVar[dict] = {}

        @classmethod
        def recognises(cls, func):
            return cls.functions[cls].get(func) is not None

    OfEachClass.functions[OfEachClass] = table

    class Inherits(by_name("is")):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    by_operator = {operator: by_name(operator) for operator in ("is", "==", "in")}
    others = ByImport, InTable, OfClass, OfEachClass, Inherits
    return by_operator | {cls.__name__: cls for cls in others}


def test_a_class_recognises_what_it_is_handed():
    """It asks for a function by name at each call, or has a table, which is older than a conversion or younger."""
    older = classes()
    assert all(map(handed_linear, older.values()))
    with hmpx.convert(**AUTOCAST_LISTS):
        for way, cls in [*older.items(), *classes().items()]:
            assert handed_linear(cls), way
            with hmpx.disable_casts():
                assert handed_linear(cls), way


def test_an_older_table_counts_more_than_a_name():
    table = {F.linear: "in the table"}

    class Both(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            found = table.get(func)
            if found is None and func is torch.nn.functional.linear:
                return "by name"
            return found or super().__torch_function__(func, types, args, kwargs or {})

    x, weight = torch.randn(2, 3).as_subclass(Both), torch.randn(3, 3)
    with hmpx.convert(**AUTOCAST_LISTS):
        assert F.linear(x, weight) == "in the table"
        with hmpx.disable_casts():
            assert F.linear(x, weight) == "in the table"


NEVER = [
    "import antigravity",
    "from .nowhere import nothing",
    "from no_module import nothing",
    "raises.now is func",
    "none.a.b(1)",
]


def test_code_of_a_class_is_read_and_not_run():
    class Raises:
        @property
        def now(self):
            raise RuntimeError("it was run")

    source = """
class Reads(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is None:
            {}
        if func is torch.nn.functional.linear:
            return "recognised"
        return super().__torch_function__(func, types, args, kwargs or {{}})
"""
    with hmpx.convert(**AUTOCAST_LISTS):
        for never, name in itertools.product(NEVER, ({}, {"__name__": "some.module"})):
            variables = {"raises": Raises(), "none": None, "torch": torch, "Tensor": torch.Tensor, **name}
            exec(source.format(never), variables)
            x = torch.randn(2, 3).as_subclass(variables["Reads"])
            assert F.linear(x, torch.randn(3, 3)) == "recognised", (never, name)
    assert "antigravity" not in sys.modules


def test_a_class_may_get_another_method():
    cls = by_name("is")
    with hmpx.convert(**AUTOCAST_LISTS):
        assert handed_linear(cls)
        cls.__torch_function__ = classmethod(by_name("in").__torch_function__.__func__)
        cls.recognises = classmethod(lambda cls, func: func in (torch.nn.functional.linear,))
        assert handed_linear(cls)


def test_a_class_is_not_held():
    def used():
        cls = by_name("is")
        with hmpx.convert(**AUTOCAST_LISTS):
            handed_linear(cls)
        return weakref.ref(cls)

    seen = used()
    gc.collect()
    assert seen() is None


def test_what_a_tensor_has_beside_its_numbers_is_there_after_a_cast():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.linear:
                return args[0].label, args[0].dtype
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(2, 3).as_subclass(Named)
    x.label = "inputs"
    with hmpx.convert(**AUTOCAST_LISTS):
        assert F.linear(x, torch.randn(3, 3)) == ("inputs", BF16)
    assert x.dtype is FP32


def test_a_class_without_attributes_is_cast():
    class Bare(torch.Tensor):
        @property
        def __dict__(self):
            raise AttributeError

    with hmpx.convert(**AUTOCAST_LISTS):
        assert F.linear(torch.randn(2, 3).as_subclass(Bare), torch.randn(3, 3)).dtype is BF16


def of(cls, values):
    return cls(values) if issubclass(cls, torch.nn.Parameter) else values.clone().as_subclass(cls)


CALLS = {
    "linear": lambda x, w: F.linear(x, w),
    "layer": lambda x, w: torch.func.functional_call(torch.nn.Linear(8, 8, bias=False), {"weight": w}, (x,)),
    "x @ w": lambda x, w: x @ w,
    "matmul": lambda x, w: torch.matmul(x, w),
    "softmax": lambda x, w: torch.softmax(w, -1),
    "cat": lambda x, w: torch.cat([x.bfloat16(), w]),
    "batch_norm": lambda x, w: F.batch_norm(w, torch.zeros(8), torch.ones(8)),
    "mul": lambda x, w: x.bfloat16()[0] * w,
}


ROUNDED = {RoundsWeights: {"linear", "layer"}, RoundsByTable: {"linear", "layer", "x @ w", "matmul"}, Forgetful: set()}


@pytest.mark.parametrize(("cls", "way"), spanning(ROUNDED, ["", "float32 kernels, recorded"]))
def test_a_class_is_asked_whose_casts_are_plain_tensors(cls, way):
    """As under torch.autocast; what it does not do itself is cast."""
    torch.manual_seed(0)
    x, values = torch.randn(3, 8), torch.randn(8, 8)
    weight = of(cls, values)
    assert type(weight.bfloat16()) is torch.Tensor
    record = hmpx.record() if way else contextlib.nullcontext()
    kernels = "float32" if way else "auto"
    with hmpx.convert(**AUTOCAST_LISTS, kernels=kernels), record:
        found = {name: call(x, weight) for name, call in CALLS.items()}
        with hmpx.disable_casts():
            uncast = {name: call(x, weight) for name, call in CALLS.items()}
    for name, call in CALLS.items():
        seen = quarters(values) if name in ROUNDED[cls] else values
        assert same(uncast[name], call(x, seen)), name
        assert same(found[name], under_autocast(lambda call=call: call(x, weight))), name
        assert same(found[name], under_autocast(lambda call=call, seen=seen: call(x, seen))), name


@pytest.mark.parametrize("way", ["", "float32 kernels, recorded"])
def test_a_class_is_asked_that_refuses_to_be_cast(way):
    x, values = torch.randn(3, 8), torch.randn(8, 8)
    weight = values.as_subclass(KnowsLinear)
    record = hmpx.record() if way else contextlib.nullcontext()
    kernels = "float32" if way else "auto"
    with hmpx.convert(**AUTOCAST_LISTS, kernels=kernels), record:
        found = F.linear(x, weight)
        with pytest.raises(RuntimeError, match="matmul is not known"):
            torch.matmul(x, weight)
    assert same(found, under_autocast(lambda: F.linear(x, weight)))


def test_a_class_that_derives_from_parameter_gets_the_gradients_of_autocast():
    found = []
    for way in (under_lists, under_autocast):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 8, requires_grad=True), RoundsWeights(torch.randn(8, 8))
        out = way(lambda x=x, weight=weight: F.linear(torch.relu(F.linear(x, weight)), weight) @ weight)
        out.float().square().sum().backward()
        found.append((out, x.grad, weight.grad))
    assert same(*found)


def test_a_class_without_a_cast_is_left_as_it_is():
    values, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    masked = torch.masked.masked_tensor(values, mask)
    with hmpx.convert():  # `mul` is in the bf16 list, and a MaskedTensor has no BF16
        for found in (masked * 2, 2 * masked, masked * masked, torch.mul(masked, 2.0)):
            assert found.dtype is FP32 and type(found) is type(masked)
        assert torch.equal((masked * 2).get_data()[mask], values[mask] * 2)


class Registry:
    """Functions by torch's functions, in an object of a class of one's own."""

    def __init__(self):
        named = {"matmul": torch.matmul, "Tensor.matmul": torch.Tensor.matmul, "linear": F.linear, "gelu": F.gelu}
        named |= {"softmax": torch.softmax, "Tensor.add": torch.Tensor.add, "cat": torch.cat, "relu": torch.relu}
        self.names = {function: name for name, function in named.items()}

    def get(self, function):
        return self.names.get(function)


def diagonal(base):
    """An object with a registry, made now: of a class that is a tensor, or of one that is none."""
    registry = Registry()

    class Diagonal(base):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if base is torch.Tensor and registry.get(func) is None:
                return super().__torch_function__(func, types, args, kwargs or {})
            return registry.get(func) or NotImplemented

        def __rtruediv__(self, other):
            return "reflected"

    return torch.ones(4, 4).as_subclass(Diagonal) if base is torch.Tensor else Diagonal()


X = torch.randn(4, 4)
ASKED = {
    "x @ d": lambda d: X @ d,
    "x.matmul(d)": lambda d: X.matmul(d),
    "matmul": lambda d: torch.matmul(input=X, other=d),
    "linear": lambda d: F.linear(X, X, d),
    "softmax": lambda d: torch.softmax(d, -1),
    "gelu": lambda d: F.gelu(d),
    "cat": lambda d: torch.cat([X, d]),
    "relu": lambda d: torch.relu(d),
    "x + d": lambda d: X + d,
    "x / d": lambda d: X / d,
    "bmm": lambda d: torch.bmm(d, X),
}


def answers(d):
    found = {}
    for name, call in ASKED.items():
        try:
            found[name] = call(d)
        except (TypeError, RuntimeError) as error:
            found[name] = type(error)
    return {name: answer for name, answer in found.items() if not isinstance(answer, torch.Tensor)}


@pytest.mark.parametrize("base", [object, torch.Tensor])
@pytest.mark.parametrize("kernels", ["native", "float32"])
def test_whoever_overrides_functions_is_asked_be_it_a_tensor_or_not(base, kernels):
    """As torch asks it, by a registry that is older or younger than the conversion; Python asks the other operand."""
    older = diagonal(base)
    expected = answers(older)
    assert base is torch.Tensor or (expected["x / d"] == "reflected" and expected["bmm"] is TypeError)
    with hmpx.convert(**AUTOCAST_LISTS, kernels=kernels):
        assert answers(older) == expected and answers(diagonal(base)) == expected
        with hmpx.disable_casts():
            assert answers(older) == expected and answers(diagonal(base)) == expected


def modes():
    """Function modes that look for functions in each way, made now; each notes what it has recognised."""
    table, registry = Registry().names, Registry()

    class InTable(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen, self.own = [], dict(table)

        def recognised(self, func):
            return table.get(func)

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += filter(None, [self.recognised(func)])
            return func(*args, **(kwargs or {}))

    class OfInstance(InTable):
        def recognised(self, func):
            return self.own.get(func)

    class InRegistry(InTable):
        def recognised(self, func):
            return registry.get(func)

    class ByName(InTable):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            known = func is torch.nn.functional.linear or func == torch.matmul or func in (torch.relu, F.gelu)
            if known or func is torch.Tensor.matmul or func is torch.softmax:
                self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Inherits(OfInstance):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs)

    return InTable, OfInstance, InRegistry, ByName, Inherits


def recognised_by(*classes):
    with contextlib.ExitStack() as stack:
        entered = [stack.enter_context(cls()) for cls in classes]
        for call in (*ASKED.values(), nn.Linear(4, 4)):
            with contextlib.suppress(RuntimeError):  # bmm
                call(X)
    return [mode.seen for mode in entered]


@pytest.mark.parametrize("kernels", ["native", "float32"])
def test_a_function_mode_recognises_what_it_recognises_without_hmpx(kernels):
    older = modes()
    expected = [recognised_by(cls) for cls in older]
    assert all(len(seen) >= 6 for (seen,) in expected)
    with hmpx.convert(**AUTOCAST_LISTS, kernels=kernels):
        younger = modes()
        assert [recognised_by(cls) for cls in older] == expected == [recognised_by(cls) for cls in younger]
        assert recognised_by(older[0], younger[3]) == [*expected[0], *expected[3]]
        with hmpx.disable_casts():
            assert [recognised_by(cls) for cls in older] == expected
    assert [recognised_by(cls) for cls in (*older, *younger)] == expected * 2
    assert "__init_subclass__" not in vars(TorchFunctionMode)
