"""Whatever is done can be undone, and is undone where it breaks: after each of its steps, everything is as it was."""

import os

import pytest
import torch

import hmpx
from hmpx.ops.compilers import Compilers
from hmpx.ops.policies.catalog import catalog
from tests.support import breaking
from tests.support.breaking import Trained

BF16, FP32 = torch.bfloat16, torch.float32


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
    found = breaking.steps(run)
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
        assert breaking.broken_at(code, lambda it=it: operation(it, lists)), f"{code.co_name} was not called again"
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
        steps = {code.co_filename: code for code in reversed(breaking.steps(run))}.values()
        given.pop().remove()
        for code in steps:
            broken += breaking.broken_at(code, run)
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
