"""Each key of a recipe arrives where it acts, by `prepare`, `activate` and `attach`: what it changes is seen there.

What can be set for an optimizer's updates has three faces: `attach`'s arguments, the fields of `Settings`, and keys.
"""

import contextlib
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn, optim

import hmpx
from hmpx.conversion import installed
from hmpx.ops.computing.kernels import choose
from hmpx.recipes.keys import OF_OPS
from hmpx.recipes.reading import as_recipe, read_recipe
from hmpx.updates.holding.stores import Settings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(2, 16)
SETTINGS = {each.name: each.default for each in dataclasses.fields(Settings)}


def prepared(keys):
    """By a dict."""
    model, optimizer = made()
    hmpx.prepare(model, optimizer, keys)
    return model, optimizer


def activated(keys):
    """By a file."""
    hmpx.activate(written(keys))
    model, optimizer = made()
    model(X)
    return model, optimizer


def attached(keys):
    """By arguments, which set what the keys set and no more."""
    model, optimizer = made()
    attachment = hmpx.attach(optimizer, model=model.bfloat16(), **keys)
    assert vars(attachment.settings) == vars(as_recipe(keys).settings())
    return model, optimizer


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    return model, optim.AdamW(model.named_parameters(), lr=0.1)


def written(keys):
    Path("recipe.yaml").write_text(yaml.safe_dump(keys))
    return "recipe.yaml"


def dtype_of(op, low=False):
    """What an op makes of FP32, or of BF16; `-` where it makes what it is given."""

    def look(model, optimizer):
        x = X.bfloat16() if low else X
        with hmpx.enable_casts():
            return op(x).dtype

    return look


def setting(name):
    return lambda model, optimizer: getattr(optimizer._hmpx_attachment.settings, name)


def parameter(name):
    return lambda model, optimizer: model.get_parameter(name).dtype


def way(name):
    return lambda model, optimizer: optimizer._hmpx_attachment.settings.way(name).weights


def of_module(i):
    return lambda model, optimizer: model[i](X.to(model[i].weight.dtype)).dtype


def exp(x):
    return torch.exp(x)  # looked up in each call


def dot(x):
    return torch.dot(x[0], X[0].double().float())


def of_conversion(name):
    return lambda model, optimizer: getattr(installed(), name)


def of_policy(name):
    return lambda model, optimizer: getattr(installed().policy, name)


SEEN = {  # a key: what is said, beside it or not; where it is looked at; what is seen
    "opt_level": ({"opt_level": "O2"}, dtype_of(exp, low=True), FP32),
    "bf16": ({"bf16": ["exp"]}, dtype_of(exp), BF16),
    "fp32": ({"fp32": ["exp"], "bf16": []}, dtype_of(exp, low=True), FP32),
    "promote": ({"promote": ["dot"], "bf16": [], "fp32": []}, dtype_of(dot, low=True), FP32),
    "fp8": ({"fp8": ["linear"]}, of_policy("fp8"), ("linear",)),
    "fp8_format": (
        {"fp8": ["linear"], "fp8_format": {"scaling": "mx", "rceil": False}},
        lambda *_: installed().policy.fp8_format.scaling, "mx",
    ),
    "bf16_file_path": ({"bf16_file_path": "exp.txt"}, dtype_of(exp), BF16),
    "fp32_file_path": ({"fp32_file_path": "exp.txt", "bf16": []}, dtype_of(exp, low=True), FP32),
    "promote_file_path": ({"promote_file_path": "dot.txt", "bf16": [], "fp32": []}, dtype_of(dot, low=True), FP32),
    "fp8_file_path": ({"fp8_file_path": "linear.txt"}, of_policy("fp8"), ("linear",)),
    "low_precision": ({"low_precision": "float16"}, dtype_of(lambda x: x @ x.t()), FP16),
    "modules": (
        {"modules": {"2": "float32", "1": {"bf16": ["softmax"]}}, "parameter_dtype": "float32"}, of_module(2), FP32,
    ),
    "kernels": ({"kernels": "float32"}, lambda *_: str(installed().kernels), str(choose("float32"))),
    "where": ({"where": "everywhere"}, lambda *_: (X @ X.t()).dtype, BF16),
    "verbose": ({"verbose": True}, of_conversion("_verbose"), True),
    "dtype_map": ({"dtype_map": {"float64": "float32"}}, lambda *_: torch.ones(1, dtype=torch.float64).dtype, FP32),
    "parameter_dtype": ({"parameter_dtype": "float32"}, parameter("0.weight"), FP32),
    "parameters": ({"parameters": {"2.*": {"weights": "split"}}}, way("2.weight"), "split"),
    "weights": ({"weights": "split"}, setting("weights"), "split"),
    "state_dtype": ({"state_dtype": "8bit"}, setting("state_dtype"), "8bit"),
    "use_fp32_grad_acc": ({"use_fp32_grad_acc": True}, setting("use_fp32_grad_acc"), True),
    "use_master_weights_in_ckpt": (
        {"weights": "master", "use_master_weights_in_ckpt": True}, setting("use_master_weights_in_ckpt"), True,
    ),
    "release_gradients": ({"release_gradients": True}, setting("release_gradients"), True),
    "fused": ({"fused": False}, setting("fused"), False),
    "seed": ({"seed": 7}, setting("seed"), 7),
}  # fmt: skip


# By the default lists, and on CPUs without BF16 instructions, it is so already.
BY_DEFAULT = ("fp32", "fp32_file_path", "promote", "promote_file_path", "kernels")


ROADS = [(road, key) for road in (prepared, activated) for key in SEEN] + [(attached, name) for name in SETTINGS]


@pytest.fixture
def beside_lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for op in ("exp", "dot", "linear"):
        (tmp_path / f"{op}.txt").write_text(f"{op}\n")


@pytest.mark.parametrize(("road", "key"), ROADS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("beside_lists")
def test_a_key_arrives_where_it_acts(key, road):
    """And what is seen is not there without it, which one road shows for all."""
    keys, look, seen = SEEN[key]
    if road is not attached and keys.keys() <= SETTINGS.keys():
        keys = {**keys, "bf16": ["linear"], "fp32": [], "promote": []}  # of which a conversion is made soonest
    assert look(*road(keys)) == seen
    hmpx.restore()
    if road is not prepared:
        return
    without = {name: value for name, value in keys.items() if name != key}
    trained = road(without)
    with contextlib.suppress(AttributeError, RuntimeError):  # torch refuses a mixture, or there is no attachment
        assert look(*trained) != seen or key in BY_DEFAULT
    hmpx.restore()


@pytest.mark.usefixtures("beside_lists")
def test_a_key_means_the_same_in_a_file_and_in_a_dict():
    """Every other is as it is without any; under keys about ops alone parameters stay."""
    for key, (keys, _, _) in SEEN.items():
        read = read_recipe(written(keys))
        assert read == as_recipe(keys) == as_recipe(Path("recipe.yaml")) or key.endswith("_path"), key
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in keys.items()}
        stays = {"parameter_dtype": None} if keys.keys() <= OF_OPS else {}
        assert read == dataclasses.replace(hmpx.Recipe(), **stays, **changes), key


def test_every_key_is_looked_at():
    assert {each.name for each in dataclasses.fields(hmpx.Recipe)} == SEEN.keys() > SETTINGS.keys()


def test_the_arguments_of_attach_and_the_keys_of_a_recipe_have_the_defaults_of_the_settings():
    arguments = dict(inspect.signature(hmpx.attach).parameters)
    for about_the_optimizer in ("optimizer", "model", "names", "places", "methods", "process_group"):
        del arguments[about_the_optimizer]
    assert {name: argument.default for name, argument in arguments.items()} == SETTINGS
    assert vars(hmpx.Recipe().settings()) == SETTINGS
    documented = re.findall(r"^    (\w[\w, ]*):", inspect.getdoc(hmpx.attach), re.M)
    assert SETTINGS.keys() <= {name for names in documented for name in names.split(", ")}


def test_a_switch_is_true_or_false_and_nothing_else():
    for name in (name for name, default in SETTINGS.items() if isinstance(default, bool)):
        with pytest.raises(hmpx.HmpxError, match=f"{name}=1 is neither True nor False"):
            Settings(**{name: 1})
