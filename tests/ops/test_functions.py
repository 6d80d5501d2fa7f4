"""A user's own functions: decorators, and dotted names in lists."""

import collections
import copy
import importlib
import inspect
import pickle
import sys
import types

import pytest
import torch

import hmpx
from hmpx import conversion
from hmpx.ops.policies.lists import shipped
from hmpx.ops.sweep import Sweep
from hmpx.recipes.reading import read_recipe

X, B = torch.randn(3, 3), torch.randn(3, 3).bfloat16()


@hmpx.fp32
def in_fp32(x, *, others=(), table=None):
    """Documented."""
    return x.dtype, [o.dtype for o in others], {k: v.dtype for k, v in (table or {}).items()}, torch.matmul(x, x).dtype


@hmpx.bf16
def in_bf16(x):
    return x.dtype


@hmpx.promote
def widest(x, y, z=None):
    return x.dtype, y.dtype


class Box:
    @hmpx.bf16
    def method(self, x):
        return type(self), x.dtype

    @classmethod
    @hmpx.bf16
    def of_class(cls, x):
        return cls, x.dtype


class Batch(list):
    """A list of one's own."""


class Labelled(tuple):
    """A tuple of one's own, with an attribute."""


class Outputs(collections.OrderedDict):
    """A mapping whose items are attributes too, as the outputs of transformers' models are."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


class ReadOnly(collections.abc.Mapping):
    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


CONTAINERS = [
    *({"a": B}, collections.OrderedDict(a=B), collections.defaultdict(list, a=B), collections.UserDict(a=B)),
    *(Outputs(a=B), collections.ChainMap({"a": B}, {"b": B}), ReadOnly(a=B), types.MappingProxyType({"a": B})),
    *([B], Batch([B]), (B,), Labelled((B, 1)), torch.aminmax(B, dim=0), [{"a": (B, None)}]),
    collections.namedtuple("Pair", "a b")(B, 1),
]


@hmpx.fp32
def itself(x):
    return x


def dtypes_in(value):
    if isinstance(value, torch.Tensor):
        return {value.dtype}
    inside = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else ()
    return set().union(*map(dtypes_in, inside))


def test_tensors_in_containers_of_any_class_are_cast():
    """As `torch.amp.custom_fwd` casts them; the class stays, unless it is a mapping that cannot be written to."""
    with hmpx.convert():
        results = [itself(container) for container in CONTAINERS]
    for container, found in zip(CONTAINERS, results, strict=True):
        assert dtypes_in(found) == {torch.float32} and dtypes_in(container) == {torch.bfloat16}, container
        assert type(found) is (dict if isinstance(container, ReadOnly | types.MappingProxyType) else type(container))


def test_a_container_keeps_what_it_has_beside_its_items():
    labelled, outputs = Labelled((B, 1)), Outputs(a=B)
    labelled.label = "x"
    with hmpx.convert():
        assert itself(labelled).label == "x" and itself(outputs).a.dtype is torch.float32
        assert itself(unchanged := Batch([1, "a"])) is unchanged


def test_without_convert_a_decorated_function_is_the_plain_one():
    assert in_fp32(B)[0] is torch.bfloat16 and in_bf16(X) is torch.float32


def test_arguments_may_have_any_names():
    """Those of hmpx's own functions too, which call them; under an observer and in a module with a rule as well."""

    def names(x, *, function, rule, active, observer, point, run, frame, module, inner, args, kwargs):
        return x.dtype, function, rule, active, observer, point, run, frame, module, inner, args, kwargs

    listed, layer = hmpx.bf16(names), torch.nn.Linear(3, 3)
    layer.forward = names
    given = dict.fromkeys(("function", "rule", "active", "observer", "point", "run", "frame"), 1)
    given |= dict.fromkeys(("module", "inner", "args", "kwargs"), 2)
    wanted = torch.bfloat16, *given.values()
    rule = hmpx.policy_for(layer, "fp32")
    with hmpx.convert(isVerbose=True):
        assert listed(X, **given) == wanted and layer(X, **given)[1:] == wanted[1:]
        with hmpx.record():
            assert listed(X, **given) == wanted
    rule.remove()


def test_inputs_are_cast_and_nothing_inside_is_cast_again(lists):
    with hmpx.convert(**lists(bf16="matmul")):
        x, others, table, product = in_fp32(B, others=[B, X], table={"a": B})
        assert {x, *others, *table.values(), product} == {torch.float32}
        assert in_bf16(X) is torch.bfloat16 and widest(B, X) == (torch.float32, torch.float32)
        assert widest(B, B) == (torch.bfloat16, torch.bfloat16)
        assert (X @ X).dtype is torch.bfloat16
        with hmpx.disable_casts():
            assert in_bf16(X) is torch.float32


def test_binding_signature_and_documentation_survive():
    assert in_fp32.__doc__ == "Documented." and "others" in inspect.signature(in_fp32).parameters
    with hmpx.convert():
        assert Box().method(X) == (Box, torch.bfloat16) == Box.of_class(X)


MODULE = """
import torch
def iou(a, b):
    return a.dtype, torch.matmul(a, b).dtype
class Boxes:
    def area(self, x):
        return x.dtype
    @staticmethod
    def unit(x):
        return x.dtype
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `mylib` with a module `mylib.ops`, importable and not imported."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "__init__.py").write_text("")
    (tmp_path / "mylib" / "ops.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


NAMES = "mylib.ops.iou mylib.ops.Boxes.area mylib.ops.Boxes.unit"


def check(ops):
    assert ops.iou(X, X) == (torch.bfloat16, torch.bfloat16)
    assert ops.Boxes().area(X) is ops.Boxes.unit(X) is torch.bfloat16


def test_a_dotted_name_of_an_imported_module(lists, package):
    ops = importlib.import_module("mylib.ops")
    original = ops.iou
    captured = {"iou": ops.iou}
    ops.captured = captured
    with hmpx.convert(**lists(bf16=NAMES)) as handle:
        check(ops)
        assert captured["iou"](X, X)[0] is torch.bfloat16
        assert not any("not imported" in line for line in handle.escaped)
    assert ops.iou is original is captured["iou"] and ops.iou(X, X)[0] is torch.float32


def test_of_names_in_two_modules_each_waits_for_its_own(lists, package, tmp_path, caplog):
    (tmp_path / "mylib" / "others.py").write_text("def giou(a):\n    return a.dtype\n")
    with hmpx.convert(**lists(bf16="mylib.ops.iou mylib.others.giou")) as handle:
        assert importlib.import_module("mylib.ops").iou(X, X)[0] is torch.bfloat16
        assert [line for line in handle.escaped if "mylib" in line] == ["mylib.others.giou is not imported yet"]
        assert importlib.import_module("mylib.others").giou(X) is torch.bfloat16
    assert not caplog.text


def test_a_module_imported_after_restore_is_left_alone(lists, package):
    hmpx.convert(**lists(bf16=NAMES))
    hmpx.restore()
    assert importlib.import_module("mylib.ops").iou(X, X)[0] is torch.float32


def test_an_inherited_method_is_deleted_again(lists, package):
    ops = importlib.import_module("mylib.ops")

    class Child(ops.Boxes):
        pass

    ops.Child = Child
    with hmpx.convert(**lists(bf16="mylib.ops.Child.area")):
        assert Child().area(X) is torch.bfloat16 and ops.Boxes().area(X) is torch.float32
    assert "area" not in vars(Child)


def test_functions_copy_and_pickle_by_name():
    assert copy.deepcopy({"f": in_bf16})["f"] is in_bf16 is pickle.loads(pickle.dumps(in_bf16))


@pytest.mark.parametrize("decorated", [lambda: (yield), torch.nn.Linear, "text"])
def test_what_is_no_plain_function_is_refused(decorated):
    with pytest.raises(hmpx.HmpxError, match=r"generator or coroutine|is no function"):
        hmpx.bf16(decorated)


TORCHVISION = {
    "torchvision/__init__.py": "from torchvision import ops\n",
    "torchvision/ops/__init__.py": "from .boxes import nms\nfrom .align import *\n",
    "torchvision/ops/boxes.py": (
        "def nms(boxes, scores, iou_threshold):\n    return boxes.dtype, scores.dtype\n"
        "def batched_nms(boxes, scores, idxs, iou_threshold):\n    return nms(boxes, scores, iou_threshold)\n"
    ),
    "torchvision/ops/align.py": "".join(
        f"def {name}(input, boxes, weight=None):\n    return input.dtype, boxes.dtype\n"
        for name in ("deform_conv2d", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
    ),
    "torchvision/ops/poolers.py": "from .align import roi_align as pool\n",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package named torchvision, since the real one needs the torch that it was built beside."""
    for path, text in TORCHVISION.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield lambda: importlib.import_module("torchvision.ops")
    hmpx.restore()
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


LISTS = ["default", "autocast-cpu", "autocast-cuda", "autocast-xla"]


@pytest.mark.parametrize(("folder", "before"), [(folder, folder == "default") for folder in LISTS])
def test_torchvisions_ops_are_in_fp32_as_its_own_autocast_has_them(stand_in, folder, before):
    """Whether it is imported before `convert` or after, and by whatever name of its package they are called."""
    if before:
        stand_in()
    sides = ("bf16", "fp32", "promote")
    with hmpx.convert(**{f"{side}_file_path": shipped() / folder / f"{side}.txt" for side in sides}):
        ops = stand_in()
        boxes, poolers = (importlib.import_module(f"torchvision.ops.{name}") for name in ("boxes", "poolers"))
        captured = ops.nms
        results = [ops.nms(B, B, 0.5), boxes.nms(B, B, 0.5), boxes.batched_nms(B, B, X, 0.5), captured(B, B, 0.5)]
        for name in ("deform_conv2d", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"):
            results.append(getattr(ops, name)(B, B))
        results += [poolers.pool(B, B)]
    assert set(results) == {(torch.float32, torch.float32)}
    after = [ops.nms(B, B, 0.5), boxes.batched_nms(B, B, X, 0.5), captured(B, B, 0.5), poolers.pool(B, B)]
    assert set(after) == {(torch.bfloat16, torch.bfloat16)}
    assert not hasattr(boxes.nms, "__wrapped__")


def test_without_torchvision_nothing_is_said_for_the_shipped_lists_or_copies_of_them(
    monkeypatch, lists, caplog, tmp_path
):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    (tmp_path / "copy.yaml").write_text(str(read_recipe("neuron-bf16-sr")))
    copied = read_recipe(tmp_path / "copy.yaml").policy()
    assert "torchvision.ops.nms" in copied.fp32
    for install in (conversion.convert, lambda: conversion.install(conversion.Conversion(copied))):
        with install() as handle:
            assert not caplog.text and not any("torchvision" in line for line in handle.escaped)
    with hmpx.convert(**lists(fp32="torchvision.ops.box_iou")) as handle:
        assert "torchvision.ops.box_iou is not importable now" in caplog.text
        assert any("torchvision.ops.box_iou is not imported yet" in line for line in handle.escaped)


def test_an_import_in_the_middle_of_another_starts_no_sweep(stand_in, monkeypatch):
    with hmpx.convert():
        monkeypatch.setattr(Sweep, "everything", lambda sweep: pytest.fail("a sweep within an import"))
        assert stand_in().nms(B, B, 0.5)[0] is torch.float32
        monkeypatch.undo()


def test_a_wrapper_that_outlives_its_conversion_casts_nothing(lists, monkeypatch):
    """Nobody can take it out of the local variable of a function that is running."""
    module = types.ModuleType("outlived")
    exec("def double(x):\n    return x * 2", vars(module))
    monkeypatch.setitem(sys.modules, "outlived", module)
    with hmpx.convert(**lists(bf16="outlived.double")):
        held = module.double
        assert held(X).dtype is torch.bfloat16
    assert held is not module.double and held(X).dtype is torch.float32
    with hmpx.convert(**lists(bf16="outlived.double")):
        assert held(X).dtype is torch.float32 and module.double(X).dtype is torch.bfloat16
