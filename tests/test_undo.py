"""Whatever is done can be undone, and is undone where it breaks: after each of its steps, everything is as it was."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hmpx
from hmpx.ops.compilers import Compilers
from hmpx.ops.policies.catalog import catalog

BF16, FP32 = torch.bfloat16, torch.float32
PACKAGE = os.path.dirname(hmpx.__file__)
UNDOING = {"close", "take_back", "__exit__", "restore", "detach"}
LAST = {"enter", "_enter_region"}  # of a region: they only note that it is open, and cannot fail


def entered(region):
    with region():
        pass


def attached(**how):
    return lambda it, lists: hmpx.attach(it.optimizer, **how).detach()


def prepared(it, lists):
    """By a recipe that has at once what sets `lean` and `flash` apart from the others."""
    keys = dict.fromkeys(("use_master_weights_in_ckpt", "release_gradients"), True)
    recipe = {"parameter_dtype": "bfloat16", "weights": "split8", "state_dtype": "8bit", **keys}
    hmpx.prepare(it.model, it.optimizer, recipe)
    hmpx.restore()
    hmpx.detach(it.optimizer)


# The operation, with what takes it back, on a model and optimizer of that dtype.
OPERATIONS = {
    "convert, verbose, with a map of dtypes": (
        FP32,
        lambda it, lists: hmpx.convert(**lists(bf16="linear"), isVerbose=True, dtype_map={FP32: BF16}).restore(),
    ),
    "activate": (FP32, lambda it, lists: hmpx.activate("neuron-bf16-sr").restore()),
    "disable_casts": (FP32, lambda it, lists: entered(hmpx.disable_casts)),
    "cached_weights": (FP32, lambda it, lists: entered(hmpx.cached_weights)),
    "doctor": (FP32, lambda it, lists: entered(hmpx.doctor)),
    "attach, split": (BF16, attached(weights="split", use_master_weights_in_ckpt=True)),
    "attach, master": (BF16, attached(weights="master", use_fp32_grad_acc=hasattr(torch.Tensor, "grad_dtype"))),
    "attach, split8 and 8-bit state, in a rule": (
        BF16,
        attached(parameters={"0.*": {"weights": "split8", "state_dtype": "8bit"}}, use_master_weights_in_ckpt=True),
    ),
    "attach, released": (BF16, attached(release_gradients=True)),
    "prepare": (FP32, prepared),
}


WHOLE = ("convert", "activate", "prepare")  # hundreds of steps, and each takes a conversion: the first of each file


def steps_of(name, run):
    """Of what converts among other things, the steps in files of the conversion alone are those of `convert`."""
    found = _steps(run)
    assert len(found) > 2
    if name.startswith(WHOLE):
        found = [*{code.co_filename: code for code in reversed(found)}.values()]
    if name.startswith(WHOLE[1:]):
        found = [code for code in found if f"hmpx{os.sep}ops{os.sep}" not in code.co_filename]
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_breaks_at_any_step_leaves_everything_as_it_was(name, lists, untouched):
    dtype, operation = OPERATIONS[name]
    operation(Trained(dtype), lists)  # what is made once stays: catalogues, classes that torch wraps
    whole = Trained(dtype)
    for code in steps_of(name, lambda: operation(whole, lists)):
        it = Trained(dtype)
        picture = it.picture()
        assert _broken_at(code, lambda it=it: operation(it, lists)), f"{code.co_name} was not called again"
        now = it.picture()
        assert [key for key in picture if picture[key] != now[key]] == [], code.co_name
        del it, now
        assert untouched.changed() == [], code.co_name


def test_a_rule_that_breaks_at_any_step_leaves_the_conversion_and_other_rules_in_force(lists, untouched):
    it, x = Trained(), torch.randn(3, 6)
    names = iter(sorted(name for name, op in catalog().items() if op.computes))
    it.model.eval()
    picture = it.picture()
    with hmpx.convert(**lists(bf16="linear batch_norm")) as conversion:
        rule, given, broken = hmpx.policy_for(it.model[2], "fp32"), [], 0

        def run():
            given.append(hmpx.policy_for(it.model[0], fp32=[next(names)]))  # another one each time, which is new

        def seen():
            hidden = it.model[0](x)
            return hidden.dtype, it.model[2](it.model[1](hidden)).dtype, torch.nn.functional.linear(x, x).dtype

        dtypes = seen()
        assert dtypes == (BF16, FP32, BF16)
        steps = {code.co_filename: code for code in reversed(_steps(run))}.values()
        given.pop().remove()
        for code in steps:
            broken += _broken_at(code, run)
            while given:  # an op that does not need this step
                given.pop().remove()
            assert seen() == dtypes and conversion.active, code.co_name
        assert broken >= 10
        rule.remove()
    assert it.picture() == picture and untouched.changed() == []


def test_lists_whose_wrappers_were_interrupted_hold_when_they_are_given_again(lists, monkeypatch):
    layer, x = torch.nn.Linear(6, 6), torch.randn(3, 6)

    def interrupted(*_):
        raise KeyboardInterrupt

    def ruled():
        return hmpx.policy_for(layer, fp32=["linear"])

    with hmpx.convert(**lists(bf16="linear")):
        with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
            once.setattr(Compilers, "add", interrupted)
            ruled()
        assert layer(x).dtype is BF16
        rule = ruled()
        assert layer(x).dtype is FP32
        rule.remove()


# A step is a function of hmpx that an operation calls: each of them raises once, at its first call. What is undone is
# not broken a second time: an error inside of `Changes.close` is another matter, and has tests of its own.


class Broken(BaseException):
    """As an interrupt of the keyboard: nobody catches it to go on."""


def _steps(operation: Callable[[], object]) -> list[types.CodeType]:
    """The functions of hmpx that the operation calls, in the order of their first calls."""
    found: dict[types.CodeType, None] = {}

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and not _undoes(frame):
            found.setdefault(frame.f_code)

    _watched(operation, look)
    return [code for code in found if code.co_name != "<module>"]


def _broken_at(code: types.CodeType, operation: Callable[[], object]) -> bool:
    """Run the operation, with an error at the first call of a function; whether the operation has raised it."""
    met = []

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not met and not _undoes(frame):
            met.append(code)
            raise Broken(code.co_name)

    try:
        _watched(operation, look)
    except Broken:
        return True
    return False


def _watched(operation: Callable[[], object], look: Callable) -> None:
    before = sys.gettrace()
    sys.settrace(look)  # which is told of calls, and of no lines as it returns nothing
    try:
        operation()
    finally:
        sys.settrace(before)


def _undoes(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in UNDOING | LAST and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


class Trained:
    """A model and its optimizer, every part of which can be told from what it was."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=1e-2)
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6, dtype=dtype)).float().square().sum().backward()
            self.optimizer.step()

    def picture(self) -> dict[str, Any]:
        """Values, identities and hooks, by what a message calls them."""
        return dict(self._parts())

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, p in [*self.model.named_parameters(), *self.model.named_buffers()]:
            yield f"{name}: object, storage, version", (id(p), p.data_ptr())
            yield f"{name}: bits", _bits(p)
            yield f"{name}: gradient", p.grad is None or _bits(p.grad)
            hooks = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
            yield f"{name}: settings and hooks", (p.requires_grad, [len(each or ()) for each in hooks])
            yield f"{name}: dtype of gradients", p.is_leaf and getattr(p, "grad_dtype", None)
            state = self.optimizer.state.get(p, {})
            yield f"{name}: state", {key: _bits(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}
        for name, module in self.model.named_modules():
            kept = {
                key: value for key, value in vars(module).items() if not key.startswith(("_param", "_buff", "_mod"))
            }
            yield f"module {name!r}", {key: len(v) if key.endswith("hooks") else id(v) for key, v in kept.items()}
        groups = self.optimizer.param_groups
        yield "groups", [{k: [*map(id, v)] if k == "params" else v for k, v in group.items()} for group in groups]
        own = vars(self.optimizer)
        yield "the optimizer", {key: len(v) if key.endswith("hooks") else id(v) for key, v in own.items()}


def _bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
