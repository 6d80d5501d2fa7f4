"""What can be set for an optimizer's updates has three faces, which say the same.

They are `attach`'s arguments, the fields of `Settings`, and the keys of a recipe.
"""

import inspect
import re
from dataclasses import MISSING, fields

import pytest
import torch

import hmpx
from hmpx.recipes.recipe import DTYPES
from hmpx.updates.holding.stores import Settings, Way

DEFAULTS = {each.name: each.default for each in fields(Settings)}
OTHER = {  # a legal value of each setting that is not its default, and what else it needs
    "weights": {"weights": "split"},
    "seed": {"seed": 7},
    "state_dtype": {"state_dtype": torch.bfloat16},
    "parameters": {"parameters": {"0": {"weights": "split"}}},
    "use_fp32_grad_acc": {"use_fp32_grad_acc": True},
    "use_master_weights_in_ckpt": {"use_master_weights_in_ckpt": True, "weights": "master"},
    "release_gradients": {"release_gradients": True},
    "fused": {"fused": True},
}


def in_a_recipe(value):
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names[value] if isinstance(value, torch.dtype) else value


def test_the_arguments_of_attach_are_the_settings():
    arguments = dict(inspect.signature(hmpx.attach).parameters)
    for about_the_optimizer in ("optimizer", "model", "names", "places", "methods", "process_group"):
        del arguments[about_the_optimizer]
    assert {name: argument.default for name, argument in arguments.items()} == DEFAULTS
    documented = re.findall(r"^    (\w[\w, ]*):", inspect.getdoc(hmpx.attach), re.M)
    assert set(DEFAULTS) <= {name for names in documented for name in names.split(", ")}


def test_the_settings_are_keys_of_a_recipe():
    keys = {each.name: each.default for each in fields(hmpx.Recipe) if each.default is not MISSING}
    keys["parameters"] = tuple(hmpx.Recipe().parameters.items())  # a mapping there, and here its items
    assert {name: keys.get(name, "absent") for name in DEFAULTS} == {k: in_a_recipe(v) for k, v in DEFAULTS.items()}


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_setting_reaches_the_optimizer_from_both(name):
    given = OTHER[name]
    assert given[name] != DEFAULTS[name]
    expected = DEFAULTS | given
    if name == "parameters":
        expected["parameters"] = (("0", Way("split", torch.float32)),)
    settings = hmpx.Recipe(**{key: in_a_recipe(value) for key, value in given.items()}).settings()
    assert vars(settings) == expected
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    attachment = hmpx.attach(torch.optim.AdamW([p]), **given)
    assert vars(attachment.settings) == expected
    attachment.detach()


@pytest.mark.parametrize("name", [name for name, default in DEFAULTS.items() if isinstance(default, bool)])
def test_a_switch_is_true_or_false_and_nothing_else(name):
    with pytest.raises(hmpx.HmpxError, match=f"{name}=1 is neither True nor False"):
        Settings(**{name: 1})
