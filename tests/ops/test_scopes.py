"""Lists that hold in a part of a model or of a program: module rules and `casts` regions."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import sys
import types
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import hmpx
from tests.support import python
from tests.support.blocks import results, transformer
from tests.support.same import same

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("part", "name"),
    [("2", "fp32"), ("3", "fp32"), ("2.attn", "bf16")],
)
def test_a_dtype_for_a_module_is_its_code_between_casts_by_hand(name, part):
    """As if its input and its weights were cast, and nothing in it."""
    model = transformer()
    dtype, module = {"fp32": FP32, "bf16": BF16}[name], model.get_submodule(part)

    def by_hand(*args):
        inner = {key: p.to(dtype) for key, p in module.named_parameters()}
        with hmpx.disable_casts():
            return functional_call(module, inner, tuple(a.to(dtype) for a in args))

    with hmpx.convert():
        plain = results(model)
        vars(module)["forward"] = by_hand_once(module, by_hand)
        expected = results(model)
        del module.forward
        rule = hmpx.policy_for(module, name)
        found = results(model)
        rule.remove()
        assert same(found, expected)
        assert same(results(model), plain)
    assert not same(plain, expected)


def by_hand_once(module, by_hand):
    """A forward that stands in a module: `by_hand`, which calls the module again with the forward of its class."""

    def forward(*args):
        del module.forward
        try:
            return by_hand(*args)
        finally:
            vars(module)["forward"] = forward

    return forward


def product(x, y=None):
    return (x @ (x if y is None else y)).dtype


X = torch.randn(4, 4)


class Product(nn.Module):
    """What dtype a product has inside, and inside of what it holds."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, x=X):
        return [product(x), *(self.inner(x) if self.inner is not None else [])]


def test_the_rules_of_a_model_that_was_loaded_can_be_listed_and_removed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8))
    given = [hmpx.policy_for(part, fp32=["linear"]) for part in (model, model[1], model[2])]
    assert hmpx.policies_of(model) == given == hmpx.policies_of(copy.deepcopy(model))
    loaded = pickle.loads(pickle.dumps(model))
    rules = hmpx.policies_of(loaded)
    assert [rule.where for rule in rules] == [rule.where for rule in given] and not {*rules} & {*given}
    copied = copy.deepcopy(model)[2]
    for rule in (*rules, *given[:2]):
        rule.remove()
    assert hmpx.policies_of(loaded) == [] and hmpx.policies_of(model) == given[2:]
    with hmpx.convert():
        assert [part(torch.ones(2, 8)).dtype for part in (model[2], copied, loaded[2])] == [FP32, FP32, BF16]
        given[2].remove()
        assert copied(torch.ones(2, 8)).dtype is BF16  # a copy has the same rule


def test_no_call_of_a_module_in_another_changes_torch(monkeypatch):
    """What two rules make together is worked out when they are given, and not amid the first call."""
    for before in (True, False):
        inner = Product()
        outer = Product(nn.Sequential(inner))
        rules = [hmpx.policy_for(inner, bf16=["matmul"])] if before else []
        with hmpx.convert() as handle:
            rules.append(hmpx.policy_for(outer, fp32=["matmul", "linear"]))
            if not before:
                rules.append(hmpx.policy_for(inner, bf16=["matmul"]))
            patched = handle.patched
            with monkeypatch.context() as patch:
                patch.setattr(hmpx.base.process_state, "learn", lambda places: pytest.fail(f"{places} were not known"))
                assert outer() == [FP32, BF16]
            assert handle.patched == patched
        for rule in rules:
            rule.remove()


def _set_forward(module):
    module.forward = lambda x: F.linear(x, module.weight)


def _set_class(module):
    module.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: F.linear(x, self.weight)})


def _patch_class(module):
    type(module).forward = lambda self, x: F.linear(x, self.weight)


def test_a_forward_that_was_replaced_after_convert_is_said_and_has_its_rule_in_the_next_conversion():
    replacements = (_set_forward, _set_class, _patch_class)
    modules = [
        type(replace.__name__, (nn.Linear,), {"forward": lambda self, x: F.linear(x, self.weight)})(4, 4)
        for replace in replacements
    ]
    rules = [hmpx.policy_for(module, "fp32") for module in modules]
    with hmpx.convert() as handle:
        for module, replace in zip(modules, replacements, strict=True):
            assert module(X).dtype is FP32
            replace(module)
            assert module(X).dtype is BF16, replace
        said = [line for line in handle.escaped if ": the forward of a " in line]
        assert [line.partition(": the forward of a ")[0] for line in said] == [rule.where for rule in rules]
        with hmpx.record() as log:
            for module in modules:
                module(X)
        assert [log.escaped.count(line) for line in said] == [1, 1, 1]
    with hmpx.convert() as handle:
        for module in modules:
            assert module(X).dtype is FP32
            module.forward = types.FunctionType.__get__(_around(module.forward), module)
            assert module(X).dtype is FP32  # the new one calls the wrapper, and says so
        assert not [line for line in handle.escaped if "the forward of a " in line]
    for rule in rules:
        rule.remove()


def _around(forward):
    @functools.wraps(forward)
    def around(self, x):
        return forward(x)

    return around


@pytest.mark.parametrize("later", [lambda x: map(torch.exp, [x]), lambda x: (each.exp() for each in [x])])
def test_a_forward_that_returns_what_computes_later_is_an_error(later):
    class Later(nn.Module):
        def forward(self, x):
            return later(x)

    module = Later()
    rule = hmpx.policy_for(module, "fp32")
    with (
        hmpx.convert(),
        pytest.raises(hmpx.HmpxError, match=r"the forward returned a \w+, whose ops run after the call"),
    ):
        module(X)
    rule.remove()
    with hmpx.convert():
        assert len(list(module(X))) == 1


def test_record_names_the_rule_that_casts_a_modules_arguments():
    module = nn.Linear(4, 4)
    for dtype in ("fp32", "fp16"):
        rule = hmpx.policy_for(module, dtype)
        with hmpx.convert(), hmpx.record() as log:
            module(X.bfloat16() if dtype == "fp32" else X)
            X.bfloat16()
        rows = {site.reason: site.rule for site in log.sites if site.op == "to"}
        assert rows == {f"cast before the module's forward: {rule.where}": dtype, "cast by hand": ""}
        rule.remove()


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_arguments_are_cast_once_and_what_a_module_may_write_to_is_not():
    class Takes(nn.Module):
        def forward(self, x, pair, *, items, flag=None):
            return x, *pair, *items, flag

    low = X.bfloat16()
    module = Takes()
    rule = hmpx.policy_for(module, "fp32")
    with hmpx.convert():
        x, a, b, kept, flag = module(low, (low, 1), items=[low], flag=low.double())
        named = module(low, (Pair(low, 2),), items=[])[1]
        assert module(low, (), items=[], flag=low)[-1].dtype is FP32
    assert x.dtype is a.dtype is FP32 and b == 1 and kept is low and flag.dtype is torch.float64
    assert type(named) is Pair and named.first.dtype is FP32 and named.second == 2
    rule.remove()


def test_a_name_of_a_users_function_has_its_own_rule_in_a_place(lists, monkeypatch):
    mine = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    mine.first, mine.second = (lambda x: x.dtype), (lambda x: x.dtype)
    mine.table = {"second": mine.second}
    with hmpx.convert(**lists(bf16="mine.first")):
        assert mine.first(X) is BF16 and mine.second(X) is FP32
        with hmpx.casts(fp32=["mine.first"], bf16=["mine.second"]):
            assert mine.first(X.bfloat16()) is FP32 and mine.second(X) is mine.table["second"](X) is BF16
        assert mine.first(X) is BF16 and mine.second(X) is FP32
    assert mine.first(X) is FP32
    with hmpx.convert(**lists()), pytest.raises(hmpx.UnknownOpError, match="mine has no 'third'"):
        hmpx.casts(fp32=["mine.third"])


def test_a_pickled_module_has_its_rule_in_a_process_that_knows_no_other(tmp_path):
    """What wraps the forward of its class comes with it."""
    module = nn.Sequential(nn.Linear(4, 4))
    rule = hmpx.policy_for(module, "fp32")
    torch.save(module, tmp_path / "model.pt")
    rule.remove()
    program = f"""
import torch, hmpx
model, x = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False), torch.ones(1, 4)
with hmpx.convert():
    print(model(x).dtype, model[0](x).dtype)
    late = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
    print(late(x).dtype)
"""
    done = python.run("-c", program, check=True)
    assert done.stdout.split() == ["torch.float32", "torch.bfloat16", "torch.float32"]


class Yields(nn.Module):
    def forward(self, x):
        yield x


NO_DTYPE = "is no dtype of ops (legal: float32, "
SCRIPTED = torch.jit.script(nn.Linear(4, 4))
OUT = nn.MultiheadAttention(4, 2).out_proj
LATER = "a rule for a Yields: its forward is a generator or coroutine function"
COMPILED = "a rule for a RecursiveScriptModule: a scripted module is compiled, and no rule reaches its ops"
NEVER = "a rule for a NonDynamicallyQuantizableLinear: its forward is never called: MultiheadAttention takes its w"
WRONG = [
    (lambda: hmpx.policy_for(nn.Linear(1, 1)), "hmpx.policy_for: says nothing: hmpx.policy_for(torch.float32), or l"),
    (lambda: hmpx.casts(), "hmpx.casts: says nothing: hmpx.casts(torch.float32), or lists of ops"),
    (lambda: hmpx.casts("fp32", bf16=["exp"]), "hmpx.casts: a rule and bf16=: which of the two?"),
    (lambda: hmpx.casts("fp23"), "hmpx.casts: 'fp23' is no dtype of ops; did you mean 'fp32'? (legal: float32, "),
    (lambda: hmpx.casts("bf16-to-fp23"), "hmpx.casts: 'bf16-to-fp23' is no dtype of ops; did you mean 'bf16-to-fp32'?"),
    (lambda: hmpx.casts(torch.float64), f"hmpx.casts: torch.float64 {NO_DTYPE}"),
    (lambda: hmpx.casts(0), f"hmpx.casts: 0 {NO_DTYPE}"),
    (lambda: hmpx.casts("float64"), f"hmpx.casts: 'float64' {NO_DTYPE}"),
    (lambda: hmpx.casts(fp32="exp"), "hmpx.casts: fp32 is 'exp', not a list of names"),
    (lambda: hmpx.casts(fp32=["sofmax"]), f"{__file__}:"),
    (lambda: hmpx.casts(fp32=["aten::mm"]), "hmpx.casts: 'aten::mm' is no op name; did you mean 'mm'?"),
    (lambda: hmpx.casts(bf16=["exp"], fp32=["exp"]), f"{__file__}:"),
    (lambda: hmpx.policy_for(nn.Linear(1, 1), fp8=["addbmm"]), f"{__file__}:"),
    (lambda: hmpx.casts(bf16=["exp"], low_precision="fp8"), "hmpx.casts: low_precision is 'fp8', none of bfloat16"),
    (lambda: hmpx.policy_for(F.linear, "fp32"), "policy_for takes a torch.nn.Module, not a builtin_function_or_meth"),
    (lambda: hmpx.policy_for(nn.ModuleList(), "fp32"), "a rule for a ModuleList: there is no forward in it"),
    (lambda: hmpx.policy_for(OUT, "fp32"), NEVER),
    (lambda: hmpx.policy_for(Yields(), "fp32"), LATER),
    (
        lambda: hmpx.policy_for(SCRIPTED, "fp32"),
        COMPILED,
    ),
    (lambda: hmpx.policies_of("model"), "policies_of takes a torch.nn.Module, not a str"),
    (lambda: hmpx.disable_casts(3), "disable_casts(3) is over no function; a seed is given by its name: seed=3"),
    (lambda: hmpx.cached_weights(True), "cached_weights(True) is over no function"),
]


def test_what_is_wrong_is_said():
    for make, message in WRONG:
        with pytest.raises(hmpx.HmpxError) as raised:
            make()
        assert str(raised.value).startswith(message)
        assert not hmpx.base.process_state.module_rules


def test_a_region_over_a_function_whose_body_runs_later_is_refused():
    async def later():
        pass

    def generator():
        yield

    decorators = [hmpx.casts("fp32"), hmpx.casts("fp32")._recreate_cm(), hmpx.disable_casts()]
    decorators += [hmpx.disable_casts, hmpx.enable_casts(), hmpx.cached_weights()]
    for decorator, function in itertools.product(decorators, (later, generator)):
        with pytest.raises(hmpx.HmpxError, match=r"^\w+s over a generator or coroutine function"):
            decorator(function)


def test_a_module_has_its_rules_once_whichever_classes_have_others():
    """A forward that calls the one of its base class, in a region too, is in the module's lists already."""

    class Base(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Derived(Base):
        def forward(self, x):
            with hmpx.casts(bf16=["linear"]):
                return super().forward(x)

    def beside(x):
        with hmpx.casts(bf16=["linear"]):
            return Base.forward(own, x)

    derived, own, base, plain = Derived(4, 4), Base(4, 4), Base(4, 4), nn.Linear(4, 4)
    own.forward = beside
    with hmpx.convert():
        given = [hmpx.policy_for(derived, fp32=["linear"]), hmpx.policy_for(own, fp32=["linear"])]
        assert derived(X).dtype is own(X).dtype is BF16
        given += [hmpx.policy_for(each, fp32=["linear"]) for each in (base, plain)]
        assert derived(X).dtype is own(X).dtype is BF16 and base(X).dtype is plain(X).dtype is FP32
        given[2].remove()
        assert base(X).dtype is BF16
    for rule in given:
        rule.remove()
    assert not {"_hmpx_rules", "_hmpx_outermost"} & {*vars(Base), *vars(Derived), *vars(nn.Linear), *vars(own)}
    assert own.forward is beside


def test_record_sees_lists_that_are_new_and_names_what_listed_them():
    class Two(nn.Module):
        def forward(self, x):
            with hmpx.casts(bf16=["sigmoid"]):
                return (x @ x).sigmoid()

    module = Two()
    rule, uncalled = hmpx.policy_for(module, fp32=["matmul", "exp"]), hmpx.policy_for(Two(), fp32=["exp"])
    with hmpx.convert(), hmpx.record() as log:
        module(X)
        hmpx.casts(fp32=["mm"])(torch.ops.aten.mm)(X.bfloat16(), X.bfloat16())
    sites = {site.op: site for site in log.sites}
    assert sites["matmul"].reason.startswith(f"fp32: listed at {__file__}:") and sites["matmul"].rule == "fp32"
    assert sites["matmul"].reason.endswith(", hmpx.policy_for") and sites["sigmoid"].reason.endswith(", hmpx.casts")
    said = [line.rpartition(", hmpx.policy_for: ")[2] for line in log.unmatched]
    assert said == ["exp", "no op was called in it"]
    (line,) = (line for line in log.escaped if "mm is in the fp32 list at " in line)
    assert "hmpx.casts and ran in bfloat16" in line
    rule.remove()
    uncalled.remove()


def test_a_rule_with_a_name_that_is_nothing_leaves_no_rule(lists):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with hmpx.convert(**lists(bf16="linear")):
        with pytest.raises(hmpx.UnknownOpError, match="math has no 'cosine'"):
            hmpx.policy_for(model, fp32=["linear", "math.cosine"])
        assert model(x).dtype is BF16
        with hmpx.casts(fp32=["linear"]):
            assert model(x).dtype is FP32
    with hmpx.convert(**lists(bf16="linear")):
        assert model(x).dtype is BF16
