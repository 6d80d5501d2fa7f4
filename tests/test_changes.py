"""A change that hmpx makes outside itself is taken back where it still stands, and left with a warning where not."""

import types

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.base.changes import MISSING, Attribute, Cell, Changes, Flag, Item

BF16 = torch.bfloat16


class Owner:
    inherited = "of the class"


def targets():
    """One of each kind, what it holds, and how somebody else writes to it."""
    owner, mapping, box = Owner(), {"key": "before"}, ["before"]
    owner.attribute = "before"

    def function(value="before"):
        return lambda: value

    cell = function().__closure__[0]
    return {
        "attribute": (Attribute(owner, "attribute", "Owner.attribute"), "before"),
        "inherited": (Attribute(owner, "inherited", "Owner.inherited"), MISSING),
        "item": (Item(mapping, "key", "a key"), "before"),
        "new item": (Item(mapping, "other", "another key"), MISSING),
        "cell": (Cell(cell, "a variable"), "before"),
        "flag": (Flag("a setting", lambda: box[0], lambda value: box.__setitem__(0, value)), "before"),
    }


def test_a_place_holds_what_it_held_again(caplog):
    """What somebody else has taken back already is no news."""
    for kind, (target, before) in targets().items():
        with Changes() as changes:
            assert changes.put(target, "ours") == before and target.read() == "ours"
        assert target.read() == before, kind
        with Changes() as changes:
            changes.put(target, "ours")
            target.write(before)
        assert target.read() == before and not caplog.records, kind


def test_what_somebody_else_has_put_on_top_stays_with_a_warning(caplog):
    for kind, (target, _) in targets().items():
        with Changes() as changes:
            changes.put(target, "ours")
            target.write("theirs")
        assert target.read() == "theirs", kind
        assert f"{target.label} was {target.verb} again" in caplog.records[-1].message
    assert len(caplog.records) == len(targets())


def test_a_value_that_is_there_already_is_no_change_so_a_later_one_stays(caplog):
    box = ["same"]
    flag = Flag("a setting", lambda: box[0], lambda value: box.__setitem__(0, value))
    with Changes() as changes:
        changes.put(flag, "same")
        box[0] = "the user's"
    assert box == ["the user's"] and not caplog.records


def test_changes_of_one_place_are_undone_in_reverse_and_all_of_them_although_one_fails():
    mapping = {"key": 0}

    def fail(value):
        raise RuntimeError(f"half-way {value}")

    changes = Changes()
    for value in (1, 2):
        changes.put(Item(mapping, "key", "a key"), value)
        changes.callback(fail, value)
    with pytest.raises(
        RuntimeError, match="half-way 2"
    ):  # the first that fails is raised, and the youngest comes first
        changes.close()
    assert mapping == {"key": 0}


WATCHED = ("add_param_group", "_process_value_according_to_param_policy", "profile_hook_step")


@pytest.fixture
def theirs():
    """Patch a method of optimizers as another library would: a function of theirs around what is there."""
    undo, original = Changes(), {name: vars(optim.Optimizer)[name] for name in WATCHED}

    def patch(name):
        inner = getattr(optim.Optimizer, name)

        def outer(*args, **kwargs):
            outer.calls += 1
            return inner(*args, **kwargs)

        outer.calls = 0
        setattr(optim.Optimizer, name, staticmethod(outer) if isinstance(original[name], staticmethod) else outer)
        undo.callback(setattr, optim.Optimizer, name, original[name])
        return outer

    yield patch
    hmpx.restore()
    undo.close()


def sgd(momentum=0.0):
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    p.grad = torch.ones(4, dtype=BF16)
    return p, optim.SGD([p], lr=1e-3, momentum=momentum)


@pytest.mark.parametrize("name", WATCHED)
def test_a_patch_on_top_of_what_watches_steps_stays_and_is_called(name, theirs, caplog):
    hmpx.convert()
    outer = theirs(name)
    hmpx.restore()
    assert getattr(optim.Optimizer, name) is outer
    assert f"torch.optim.Optimizer.{name} was patched again" in caplog.text
    # Ours below it is inert: a plain step, state cast down by a load, a class hooked by torch alone.
    cls = type("Fresh", (optim.SGD,), {"step": lambda self, closure=None: super(cls, self).step(closure)})
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = cls([p], lr=1e-3, momentum=0.9)
    p.grad = torch.ones(4, dtype=BF16)
    optimizer.step()
    assert "hmpx_step" not in optimizer.param_groups[0]
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.ones(4)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["momentum_buffer"].dtype is BF16 and outer.calls
    hmpx.convert()  # and with theirs below, a new conversion works
    with hmpx.disable_casts():
        p, optimizer = sgd()
        optimizer.step()
    assert optimizer.param_groups[0]["hmpx_step"] == 1
    hmpx.restore()
    assert getattr(optim.Optimizer, name) is outer


def test_a_patch_that_was_there_before_is_called_below_ours(theirs):
    outer = theirs("add_param_group")
    with hmpx.convert():
        sgd()
        assert outer.calls == 1
    assert optim.Optimizer.add_param_group is outer


def test_settings_that_a_user_made_meanwhile_stay(caplog):
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with hmpx.convert(dtype_map={torch.float32: BF16}):
        assert torch.get_default_dtype() is BF16 and not torch.backends.mha.get_fastpath_enabled()
        torch.set_default_dtype(torch.float64)
    try:
        assert torch.get_default_dtype() is torch.float64 and "the default dtype was set again" in caplog.text
        assert torch.backends.mha.get_fastpath_enabled() is fast_path
    finally:
        torch.set_default_dtype(torch.float32)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with hmpx.convert():  # False already, so it is not ours
            torch.backends.mha.set_fastpath_enabled(True)
        assert torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def test_a_scripting_function_of_somebody_else_stays(caplog):
    from torch.jit import _recursive

    original = _recursive.try_compile_fn
    with hmpx.convert():
        inner = _recursive.try_compile_fn
        _recursive.try_compile_fn = theirs = types.FunctionType(
            inner.__code__, inner.__globals__, closure=inner.__closure__
        )
    try:
        assert _recursive.try_compile_fn is theirs and "try_compile_fn was patched again" in caplog.text
        assert torch.jit.script(nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)
    finally:
        _recursive.try_compile_fn = original


def test_an_undo_that_is_interrupted_runs_again_before_the_older_ones():
    done, changes = [], Changes()

    def interrupted():
        done.append("younger")
        if done == ["younger"]:
            raise KeyboardInterrupt

    changes.callback(done.append, "older")
    changes.callback(interrupted)
    with pytest.raises(KeyboardInterrupt):
        changes.close()
    assert done == ["younger", "younger", "older"]
