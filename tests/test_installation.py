"""One conversion, and one recipe, is in force at a time; a ``with`` gives back the one that it replaced."""

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.ops.casts import PatchTable

X = torch.randn(4, 4, requires_grad=True)  # a model's: a recipe casts no other op
BF16, FP32 = torch.bfloat16, torch.float32


def found():
    """What matmul and exp give: which of the lists below is in force."""
    return (X @ X).dtype, X.exp().dtype


MATMUL, EXP, NONE = (BF16, FP32), (FP32, BF16), (FP32, FP32)


# The lists that each of them stands for.
OF_MATMUL, OF_EXP = ({"bf16": [name], "fp32": [], "promote": []} for name in ("matmul", "exp"))


def test_the_inner_exit_gives_the_enclosing_conversion_back(untouched):
    with hmpx.convert(**OF_MATMUL) as outer:
        assert found() == MATMUL
        with hmpx.convert(**OF_EXP) as inner:
            assert found() == EXP and inner.active and not outer.active
            with hmpx.convert(**OF_MATMUL):
                assert found() == MATMUL
            assert found() == EXP
        assert found() == MATMUL and outer.active and not inner.active
        ops = {patch.op for patch in outer.patched if patch.rule is hmpx.Rule.BF16}
        assert "matmul" in ops and "exp" not in ops
    assert found() == NONE and not untouched.changed()


def test_a_with_gives_a_plain_conversion_back_too():
    hmpx.convert(**OF_MATMUL)
    with pytest.raises(ZeroDivisionError), hmpx.convert(**OF_EXP):
        raise ZeroDivisionError
    assert found() == MATMUL
    hmpx.restore()


def test_without_a_with_a_second_call_replaces_the_first_for_good():
    first = hmpx.convert(**OF_MATMUL)
    second = hmpx.convert(**OF_EXP)
    assert found() == EXP and second.active and not first.active
    first.restore()  # not the one in force: nothing happens
    assert found() == EXP and second.active
    second.restore()
    assert found() == NONE
    with hmpx.convert(**OF_MATMUL):
        hmpx.convert(**OF_EXP)
    assert found() == EXP  # what was said last, and not taken back
    hmpx.restore()


def test_restore_ends_all_of_them(untouched):
    with hmpx.convert(**OF_MATMUL), hmpx.convert(**OF_EXP):
        hmpx.restore()
        assert found() == NONE
    assert found() == NONE and not untouched.changed()


def test_one_that_has_ended_is_not_given_back(untouched):
    outer = hmpx.convert(**OF_MATMUL)
    outer.__enter__()
    inner = hmpx.convert(**OF_EXP)
    inner.__enter__()
    outer.__exit__(None, None, None)  # as generators end out of order
    assert found() == EXP
    inner.__exit__(None, None, None)
    assert found() == NONE and not untouched.changed()


def test_a_conversion_that_fails_inside_leaves_the_enclosing_one_in_force(monkeypatch, untouched):
    with hmpx.convert(**OF_MATMUL) as outer:
        apply, calls = PatchTable.apply, []

        def fail_once(table, changes):
            calls.append(table)
            if len(calls) == 1:
                apply(table, changes)
                raise RuntimeError("half-way")
            return apply(table, changes)

        monkeypatch.setattr(PatchTable, "apply", fail_once)
        with pytest.raises(RuntimeError, match="half-way"):
            hmpx.convert(**OF_EXP)
        assert outer.active and found() == MATMUL
    assert not untouched.changed()


def test_a_handle_that_is_not_in_force_cannot_be_entered():
    first = hmpx.convert(**OF_MATMUL)
    hmpx.convert(**OF_EXP)
    with pytest.raises(hmpx.HmpxError, match="not in force any more"), first:
        pass
    assert found() == EXP
    hmpx.restore()


def test_replaced_conversions_are_let_go():
    for _ in range(4):
        handle = hmpx.convert(**OF_MATMUL)
    assert handle._before is not None and handle._before._before is None
    hmpx.restore()


def test_an_enclosing_conversion_keeps_its_verbosity_its_map_and_its_regions(caplog):
    caplog.set_level("INFO", logger="hmpx")
    with hmpx.convert(**OF_MATMUL, isVerbose=True, enabled=False, dtype_map={FP32: BF16}):
        with hmpx.convert(**OF_EXP):
            assert torch.zeros(1).dtype is FP32 and found() == EXP
        assert torch.zeros(1).dtype is BF16 and found() == NONE
        caplog.clear()
        with hmpx.enable_casts():
            assert found() == MATMUL
        assert "matmul as" in caplog.text
    assert torch.zeros(1).dtype is FP32


def made():
    """What a recipe makes of a model and its optimizer."""
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.named_parameters(), lr=1e-3)
    attached = vars(optimizer).get("_hmpx_attachment")
    return model.weight.dtype, attached and attached.settings.weights


def test_recipes_nest_like_conversions(untouched):
    with hmpx.activate({"weights": "split", "bf16": ["matmul"], "fp32": []}) as outer:
        assert made() == (BF16, "split") and found() == MATMUL
        with hmpx.activate({"weights": "master", "bf16": ["exp"], "fp32": []}):
            assert made() == (BF16, "master") and found() == EXP
        assert made() == (BF16, "split") and found() == MATMUL and outer.active
    assert made() == (FP32, None) and found() == NONE
    assert not untouched.changed()


def test_a_recipe_inside_a_conversion_and_a_conversion_inside_a_recipe(untouched):
    with hmpx.convert(**OF_MATMUL):
        with hmpx.activate({"bf16": ["exp"], "fp32": [], "parameter_dtype": BF16}):
            assert found() == EXP
            with hmpx.convert(**OF_MATMUL):
                assert found() == MATMUL and made()[0] is BF16
            assert found() == EXP and made()[0] is BF16
        assert found() == MATMUL and made()[0] is FP32
    assert found() == NONE
    hmpx.activate({"bf16": ["exp"], "fp32": [], "parameter_dtype": BF16})
    with hmpx.convert(**OF_MATMUL), hmpx.activate("neuron-bf16-sr"):
        hmpx.restore()
    assert found() == NONE and made() == (FP32, None) and not untouched.changed()
