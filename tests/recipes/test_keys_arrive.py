"""Each key of a recipe arrives where it acts, by `prepare` and by `activate`: what it changes is seen there."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.conversion import installed
from hmpx.ops.computing.kernels import choose

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(2, 16)


def prepared(recipe):
    return made(recipe, lambda model, optimizer: hmpx.prepare(model, optimizer, recipe))


def activated(recipe):
    hmpx.activate(recipe)
    return made(recipe, lambda model, optimizer: model(X))


def made(recipe, then):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    optimizer = optim.AdamW(model.named_parameters(), lr=0.1)
    then(model, optimizer)
    return model, optimizer


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
    "fp8_format": ({"fp8": ["linear"], "fp8_format": "mx"}, lambda *_: installed().policy.fp8_format.scaling, "mx"),
    "bf16_file_path": ({"bf16_file_path": "exp.txt"}, dtype_of(exp), BF16),
    "fp32_file_path": ({"fp32_file_path": "exp.txt", "bf16": []}, dtype_of(exp, low=True), FP32),
    "promote_file_path": ({"promote_file_path": "dot.txt", "bf16": [], "fp32": []}, dtype_of(dot, low=True), FP32),
    "fp8_file_path": ({"fp8_file_path": "linear.txt"}, of_policy("fp8"), ("linear",)),
    "low_precision": ({"low_precision": "float16"}, dtype_of(lambda x: x @ x.t()), FP16),
    "modules": ({"modules": {"2": "float32"}, "parameter_dtype": "float32"}, of_module(2), FP32),
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


@pytest.mark.parametrize("road", [prepared, activated], ids=["prepare", "activate"])
@pytest.mark.parametrize("key", SEEN)
@pytest.mark.filterwarnings("ignore")
def test_a_key_arrives_where_it_acts(key, road, tmp_path, monkeypatch):
    """And what is seen is not there without it, which one road shows for both."""
    monkeypatch.chdir(tmp_path)
    for op in ("exp", "dot", "linear"):
        (tmp_path / f"{op}.txt").write_text(f"{op}\n")
    keys, look, seen = SEEN[key]
    assert look(*road(keys)) == seen
    hmpx.restore()
    if road is activated:
        return
    without = {name: value for name, value in keys.items() if name != key}
    trained = road(without)
    with contextlib.suppress(AttributeError, RuntimeError):  # torch refuses a mixture, or there is no attachment
        assert look(*trained) != seen or key in BY_DEFAULT
    hmpx.restore()


def test_every_key_is_looked_at():
    assert {each.name for each in dataclasses.fields(hmpx.Recipe)} == SEEN.keys()
