"""Names taken before convert are cast too, come back after restore, or are reported."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import matmul, nn
from torch.nn.functional import linear

import hmpx

X = torch.randn(4, 4)
TABLE = {"linear": F.linear, "other": 1}
LIST = [F.linear]
TUPLE = (F.linear,)


pytestmark = pytest.mark.usefixtures("everything_is_looked_through")


class Holder:
    attribute = F.linear
    static = staticmethod(F.linear)

    def method(self, x, apply=F.linear, *, product=torch.matmul):
        return apply(x, x), product(x, x)


def closure():
    inner = F.linear
    return lambda x: inner(x, x)


CLOSURE = closure()


def results():
    instance = Holder()
    instance_with_state = Holder()
    return [
        linear(X, X),
        matmul(X, X),
        TABLE["linear"](X, X),
        LIST[0](X, X),
        Holder.attribute(X, X),
        Holder.static(X, X),
        instance.static(X, X),
        *instance_with_state.method(X),
        CLOSURE(X),
    ]


def test_captured_names_are_cast_and_come_back():
    with hmpx.convert() as handle:
        assert {r.dtype for r in results()} == {torch.bfloat16}
        assert f"{__name__}.TABLE['linear'] holds linear" in handle.rebound
    assert {r.dtype for r in results()} == {torch.float32}
    assert linear is F.linear and matmul is torch.matmul and Holder.attribute is F.linear
    assert Holder.method.__defaults__ == (F.linear,)


class Slotted:
    __slots__ = ("function",)


DEEP = {"a": {"b": [F.linear]}}
ORDERED = OrderedDict(linear=F.linear)
SLOTTED = Slotted()
SLOTTED.function = F.linear


def with_attribute():
    return with_attribute.function(X, X)


with_attribute.function = F.linear


def test_slots_subclasses_of_dict_and_nested_containers():
    with hmpx.convert():
        ways = [DEEP["a"]["b"][0], ORDERED["linear"], SLOTTED.function]
        assert {way(X, X).dtype for way in ways} == {with_attribute().dtype} == {torch.bfloat16}
    assert DEEP["a"]["b"][0] is ORDERED["linear"] is SLOTTED.function is with_attribute.function is F.linear


def test_layers_that_keep_a_function_are_cast():
    layer = nn.TransformerEncoderLayer(8, 2, activation=F.leaky_relu)
    object_with_state = Holder()
    object_with_state.act = F.leaky_relu
    with hmpx.convert():
        assert layer.activation(X).dtype is torch.bfloat16
        assert object_with_state.act(X).dtype is torch.bfloat16
    assert layer.activation is F.leaky_relu is object_with_state.act


def test_names_taken_during_a_conversion_are_originals_after_it():
    with hmpx.convert():
        from torch.nn.functional import bilinear, conv2d

        kept = {"conv2d": conv2d}
        Holder.taken = conv2d
    assert Holder.taken is F.conv2d and bilinear is not None
    del Holder.taken
    assert kept["conv2d"](torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1)).dtype is torch.float32


def test_what_cannot_be_rebound_is_reported():
    local = F.linear
    partial = functools.partial(F.linear, bias=None)
    with hmpx.convert() as handle:
        escaped = "\n".join(handle.escaped)
    assert f"{__name__}.TUPLE holds linear: a tuple cannot be changed" in escaped
    assert "a functools.partial holds linear" in escaped
    assert "local variable local of" in escaped and "test_what_cannot_be_rebound_is_reported" in escaped
    assert partial.func is local is F.linear


def test_torchs_own_tables_keep_the_originals():
    original = torch.matmul
    overrides = torch.overrides.get_testing_overrides()
    with hmpx.convert():
        assert original in torch.overrides.get_testing_overrides() and original in overrides
        assert torch.overrides.resolve_name(original) == "torch.matmul"
