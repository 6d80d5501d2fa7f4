"""Which modules are models, where casts belong to the model; `test_where_casts_are.py` has what follows from that."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.recipes.reading import as_recipe, recipe_names

BF16, FP32 = torch.bfloat16, torch.float32
LISTS = {"bf16": ["linear", "matmul", "mul", "add", "sub"], "fp32": ["softmax", "div", "cross_entropy"], "promote": []}


def test_an_op_that_torch_would_refuse_is_cast_as_its_list_says():
    """A projection beside the forwards: its input is BF16 because of casts in them, its weight FP32."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with hmpx.convert(where="model", **LISTS), torch.no_grad():
        assert (model(x) @ model.weight).dtype is BF16


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class Handed(nn.Module):
    """Its forward is handed weights; `more` is what else it does, `returned` what it makes of its result."""

    def __init__(self, more=lambda self: None, returned=lambda y: y):
        super().__init__()
        self.weight, self.more, self.returned = nn.Parameter(torch.eye(8)), more, returned

    def forward(self, x, weights=None):
        self.more(self)
        return self.returned(F.linear(x, self.weight))


def writes(module):
    with torch.no_grad():
        module.weight.mul_(1)


def test_each_call_of_a_model_is_cast_whatever_it_is_handed_and_returns():
    """The first as the others: soft prompts, a layer's weight for a loss, a teacher; and after a call that raises."""
    x, made, frozen = torch.randn(4, 8), [], Handed(writes).requires_grad_(False)
    nets = [Handed(), Handed(returned=Output), Handed(returned=lambda y: {"y": y}), Handed(writes), frozen]
    nets.append(Handed(returned=lambda y: made.append(Output(y)) or made[-1]))
    given = [(nn.Parameter(x),), (x, nn.Linear(2, 2)), (x, [nn.Parameter(x)]), (x,)]
    for failing in (None, nn.Parameter(x[:, :3])):
        with hmpx.convert(where="model", **LISTS), torch.no_grad():
            for net, args in itertools.product(nets, (*given, *given)):
                if failing is not None:
                    with pytest.raises(RuntimeError):
                        net(failing)
                y = net(*args)
                y = y["y"] if isinstance(y, dict) else getattr(y, "y", y)
                assert y.dtype is BF16, (nets.index(net), len(args))


def test_everywhere_is_the_rule_of_convert_and_the_recipes_say_which_they_have():
    with hmpx.convert(**LISTS) as handle:
        assert (torch.rand(3) * 2).dtype is BF16 and "where: everywhere" in repr(handle)
    everywhere = {name for name in recipe_names() if as_recipe(name).where == "everywhere"}
    assert everywhere == {"hmp-o1", "hmp-o2", "xla-use-bf16", "xla-downcast-bf16"}


def test_record_and_the_verbose_log_name_casts_outside_of_any_model(caplog):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    caplog.set_level("INFO", "hmpx")
    with hmpx.convert(isVerbose=True, **LISTS), hmpx.record() as log:
        model(x).sum().backward()
        for _ in range(3):
            (torch.rand(5) * 1000).long()
        with hmpx.enable_casts():
            torch.rand(5) * 1000
    outside = [(site.op, site.outside) for site in log.sites if site.outside]
    assert outside == [("mul", 3)] and "Cast outside of any model" in str(log)
    said = [r.getMessage() for r in caplog.records if "outside of any model" in r.getMessage()]
    assert len(said) == 2 and "1 times" not in said[0], "once when it is made, once in the counts at the end"
