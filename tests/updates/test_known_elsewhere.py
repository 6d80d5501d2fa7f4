"""Optimizers that keep facts of a parameter outside of `state`, beside the same optimizer on FP32 copies."""

from __future__ import annotations

import collections
import functools
import types
import weakref

import pytest
import torch
from torch import nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

import hmpx

BF16 = torch.bfloat16
X = torch.ones(4, dtype=BF16)
_GLOBAL: dict = {}


class Own(optim.Optimizer):
    """SGD, with a momentum that `buffer(optimizer, p)` keeps and a rate of `rate(optimizer, p)`.

    begin: makes the attribute `own` in the constructor. after: runs after each step.
    """

    def __init__(self, params, begin=None, buffer=None, rate=None, after=None):
        super().__init__(params, {"lr": 1e-2})
        self.steps, self.functions = 0, types.SimpleNamespace(buffer=buffer, rate=rate, after=after)
        self.own = None if begin is None else begin(self)

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        buffer, rate, after = vars(self.functions).values()
        for p in self.param_groups[0]["params"]:
            change = p.grad if buffer is None else buffer(self, p).mul_(0.9).add_(p.grad)
            p.add_(change, alpha=-1e-2 * (1.0 if rate is None else rate(self, p)))
        if after is not None:
            after(self)


def in_dict(where):
    return lambda o, p: where(o).setdefault(p, torch.zeros_like(p))


def by_mark(o, p):
    p.momentum = getattr(p, "momentum", None)
    p.momentum = torch.zeros_like(p) if p.momentum is None else p.momentum
    return p.momentum


def by_count(o, p):
    p.calls = getattr(p, "calls", 0) + 1
    return 1.0 / p.calls


def late(o, p):
    return in_dict(lambda o: o.own)(o, p) if o.steps > 3 else torch.zeros_like(p)


def in_deque(o, p):
    if all(q is not p for q, _ in o.own):
        o.own.append((p, torch.zeros_like(p)))
    return next(buffer for q, buffer in o.own if q is p)


def through_views(o):
    params = o.param_groups[0]["params"]
    o.own = o.own or [p.data.view(-1) for p in params]
    for view in o.own:
        view.mul_(0.9)


def inner(place):
    def begin(o):
        made = optim.SGD(o.param_groups, lr=1e-2, momentum=0.9)
        made.param_groups = o.param_groups
        return place(made)

    return begin


def first(o):
    return o.param_groups[0]["params"][0]


def ids(o):
    return {id(first(o))}


def of_ids(is_one):
    return lambda o, p: 1.0 if is_one(o.own, p) else 0.1


def bind(o, change):
    o.param_groups[0]["params"] = change(o.param_groups[0]["params"])


def with_default(own):
    def has(p, *, own=own):
        return id(p) in own

    return has


class Slotted:
    __slots__ = ("ids",)

    def __init__(self, ids):
        self.ids = ids

    def has(self, one):
        return one in self.ids


def writes_real_gradients(o):
    for p in o.own():
        p.grad.mul_(0.5)


KEPT, KNOWN, CHANGED = "keeps the FP32 copy of parameter '0'", "knows parameters by own, a", "changes param_groups"
SPACE = types.SimpleNamespace
# Options of `Own`, and what the refusal says: "" where the weights come to those of the FP32 twin.
KINDS = {
    "attribute": ({"buffer": by_mark}, ""),
    "count in an attribute": ({"rate": by_count}, ""),
    "optimizer in a dict": ({"begin": inner(lambda made: {"a": made}), "after": lambda o: o.own["a"].step()}, ""),
    "optimizer in an object": (
        {"begin": inner(lambda made: SPACE(a=SPACE(b=made))), "after": lambda o: o.own.a.b.step()},
        KEPT,
    ),
    "dict": ({"begin": lambda o: {}, "buffer": in_dict(lambda o: o.own)}, KNOWN),
    "dict that begins in the fourth step": ({"begin": lambda o: {}, "buffer": late}, KNOWN),
    "weak dict": ({"begin": lambda o: WeakTensorKeyDictionary(), "buffer": in_dict(lambda o: o.own)}, KNOWN),
    "deque": ({"begin": lambda o: collections.deque(), "buffer": in_deque}, KNOWN),
    "objects in objects": (
        {"begin": lambda o: SPACE(a=SPACE(b=SPACE(of={}))), "buffer": in_dict(lambda o: o.own.a.b.of)},
        KNOWN,
    ),
    "objects deep in objects": (
        {"begin": lambda o: SPACE(a=[[SPACE(a=[SPACE(of={})])]]), "buffer": in_dict(lambda o: o.own.a[0][0].a[0].of)},
        KEPT,
    ),
    "global dict": ({"buffer": in_dict(lambda o: _GLOBAL)}, KEPT),
    "dict in the state of another parameter": (
        {"buffer": in_dict(lambda o: o.state[first(o)].setdefault("of", {}))},
        KEPT,
    ),
    "views of the weights": ({"after": through_views}, KEPT),
    "set": ({"begin": lambda o: {first(o)}, "rate": of_ids(lambda own, p: p in own)}, KNOWN),
    "rates in a dict": ({"begin": lambda o: {first(o): 0.5}, "rate": lambda o, p: o.own.get(p, 0.1)}, KNOWN),
    "names in a tree": ({"begin": lambda o: {"layers": [{"weight": first(o)}]}}, KNOWN),
    "buffers by id": ({"begin": lambda o: {id(first(o)): torch.zeros(4)}}, KNOWN),
    "facts of no parameter": ({"begin": lambda o: {"sizes": [4], "other": nn.Parameter(X), "shown": None}}, ""),
    "the list of a group": (  # it is shown FP32 copies, as LBFGS's is
        {"begin": lambda o: o.param_groups[0]["params"], "rate": of_ids(lambda own, p: p is own[0])},
        "",
    ),
    "ids": ({"begin": ids, "rate": of_ids(lambda own, p: id(p) in own)}, KNOWN),
    "ids of a function": ({"begin": lambda o: functools.partial(int.__eq__, *ids(o))}, KNOWN),
    "ids in a closure": (
        {"begin": lambda o: (lambda own: lambda p: id(p) in own)(ids(o)), "rate": of_ids(lambda own, p: own(p))},
        KNOWN,
    ),
    "the parameter in a closure": (
        {"begin": lambda o: (lambda q: lambda p: p is q)(first(o)), "rate": of_ids(lambda own, p: own(p))},
        KNOWN,
    ),
    "the parameter as a default": ({"begin": lambda o: with_default(first(o))}, KNOWN),
    "ids of an object": (
        {"begin": lambda o: SPACE(ids=ids(o)), "rate": of_ids(lambda own, p: id(p) in own.ids)},
        KNOWN,
    ),
    "ids in a slot": ({"begin": lambda o: Slotted(ids(o)), "rate": of_ids(lambda own, p: id(p) in own.ids)}, KNOWN),
    "ids of a bound method": (
        {"begin": lambda o: Slotted(ids(o)).has, "rate": of_ids(lambda own, p: own(id(p)))},
        KNOWN,
    ),
    "ids as a default": ({"begin": lambda o: with_default(ids(o)), "rate": of_ids(lambda own, p: own(p))}, KNOWN),
    "weak references": (
        {"begin": lambda o: [weakref.ref(first(o))], "rate": of_ids(lambda own, p: p is own[0]())},
        KNOWN,
    ),
    "addresses": (
        {"begin": lambda o: {first(o).data_ptr()}, "rate": of_ids(lambda own, p: p.data_ptr() in own)},
        KNOWN,
    ),
    "ParameterList": (
        {
            "begin": lambda o: nn.ParameterList(o.param_groups[0]["params"][:1]),
            "rate": of_ids(lambda own, p: p is own[0]),
        },
        KNOWN,
    ),
    "list of a group that is bound anew": ({"after": lambda o: bind(o, lambda params: params[::-1])}, CHANGED),
    "list of a group that loses one": ({"after": lambda o: o.param_groups[0]["params"].pop()}, CHANGED),
    "groups that are bound anew": (
        {"after": lambda o: setattr(o, "param_groups", [dict(group) for group in o.param_groups])},
        CHANGED,
    ),
    "gradients of the real parameters": (
        {"begin": lambda o: (lambda own: lambda: own)(o.param_groups[0]["params"][:]), "after": writes_real_gradients},
        "wrote to the gradient of parameter '0' itself",
    ),
    "what refers to itself": ({"after": lambda o: (lambda own: own.append(own))(o.param_groups[0]["params"][:])}, ""),
}

AT_ONCE = ("set", "rates in a dict", "names in a tree", "buffers by id", "ids")  # by `attach`, before any step


def trained(options, dtype, steps=8):
    """Return the way of the weights."""
    _GLOBAL.clear()
    numbers = torch.Generator().manual_seed(0)
    start = [torch.randn(32, 8, generator=numbers).to(BF16) * 0.1 for _ in range(2)]
    params = [nn.Parameter(each.to(dtype, copy=True)) for each in start]
    optimizer = Own(params, **options)
    if dtype is BF16:
        try:
            hmpx.attach(optimizer, "master")
        except hmpx.HmpxError:
            assert "_hmpx_attachment" not in vars(optimizer)
            raise
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=numbers).to(BF16).to(dtype)
        before = [p.detach().clone() for p in params], list(params), optimizer.param_groups
        try:
            optimizer.step()
        except hmpx.HmpxError:
            assert all(map(torch.equal, params, before[0])), "a refusal writes nothing"
            assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True)] == [True, True]
            raise
    return torch.stack([p.detach().float() - each.float() for p, each in zip(params, start, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_knows_elsewhere_is_found_again_or_refused(kind):
    options, why = KINDS[kind]
    if why:
        with pytest.raises(hmpx.HmpxError, match=why):
            trained(options, BF16, steps=0 if kind in AT_ONCE else 8)
        return
    way, twin = trained(options, BF16), trained(options, torch.float32)
    assert (way - twin).norm() < 0.02 * twin.norm()
