"""Every public name as a typed program uses it. mypy reads this file strictly; it is not run.

`assert_type` holds what a name gives back: a signature that fell to `Any` fails there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hmpx
from hmpx import hmp

if TYPE_CHECKING:
    from typing_extensions import assert_type

Tensor = torch.Tensor


def ops(lists: Path, named: os.PathLike[str]) -> hmpx.Policy:
    assert_type(hmpx.convert(), hmpx.Conversion)
    hmpx.convert("O1", lists, "fp32.txt", True, promote_file_path=None, unknown="warn", enabled=False)
    hmpx.convert(opt_level="O2", low_precision=torch.float16, kernels="native")
    hmpx.convert(bf16_file_path=named, dtype_map={torch.float64: torch.float32})
    with hmpx.convert(kernels="float32") as handle:
        assert_type(handle, hmpx.Conversion)
        assert_type(handle.policy, hmpx.Policy)
        assert_type(handle.rebound, tuple[str, ...])
        assert_type(handle.escaped, tuple[str, ...])
        assert_type(handle.active, bool)
        print(*[patch.label for patch in handle.patched])
        handle.restore()
    hmpx.restore()
    hmp.convert(opt_level="01", bf16_file_path="", fp32_file_path="", isVerbose=False)
    return handle.policy


def rules(policy: hmpx.Policy) -> str:
    assert_type(policy.bf16, tuple[str, ...])
    assert_type(policy.listed("softmax"), hmpx.Rule | None)
    return str(policy) if policy.low_precision is torch.bfloat16 else hmpx.Rule.FP32.value


def regions(optimizer: torch.optim.Optimizer, model: torch.nn.Module, x: Tensor) -> None:
    with hmpx.disable_casts():
        optimizer.step()
    with hmpx.disable_casts(seed=3):
        optimizer.step()
    with hmp.disable_casts(), hmpx.enable_casts(), hmp.enable_casts():
        model(x)
    with hmpx.casts(torch.float32), hmpx.casts("bf16"), hmpx.casts(fp32=["softmax"]) as region:
        assert_type(region, hmpx.casts)
    rule = hmpx.policy_for(model, bf16=["linear"], low_precision=torch.float16)
    assert_type(rule, hmpx.ModuleRule)
    hmpx.policy_for(model, {"fp32": ["softmax"]})
    assert_type(rule.where, str)
    rule.remove()
    assert_type(hmpx.policies_of(model), list[hmpx.ModuleRule])
    with torch.no_grad(), hmpx.cached_weights() as cache:
        assert_type(cache, hmpx.cached_weights)
        model(x)
        cache.clear()


@hmpx.disable_casts()
def in_full(x: Tensor) -> Tensor:
    return x


@hmpx.bf16
def attention(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    return q @ k.T * scale


@hmpx.fp16
def halves(x: Tensor) -> Tensor:
    return x


@hmpx.fp32
def loss(x: Tensor) -> Tensor:
    return x.float().mean()


@hmpx.promote
def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def functions(x: Tensor) -> None:
    assert_type(attention(x, k=x, scale=2.0), Tensor)
    assert_type(halves(in_full(x)), Tensor)
    assert_type(loss(x), Tensor)
    assert_type(both(x, x), tuple[Tensor, Tensor])


def updates(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = hmpx.attach(
        optimizer,
        "master",
        model=model,
        seed=0,
        state_dtype=torch.bfloat16,
        use_fp32_grad_acc=True,
        use_master_weights_in_ckpt=True,
        release_gradients=False,
        fused=False,
        process_group=None,
    )
    assert_type(handle, hmpx.Attachment)
    assert_type(handle.optimizer, torch.optim.Optimizer | None)
    assert_type(handle.names, dict[torch.nn.Parameter, str])
    assert_type(handle.settings.seed, int | None)
    handle.detach()
    hmpx.attach(optimizer, weights="split", names=["weight", "bias"], state_dtype="bf16")
    hmpx.detach(optimizer)


def rounding(x: Tensor, out: Tensor) -> Tensor:
    assert_type(hmpx.stochastic_round_(out, x, seed=0, step=1, name="weight"), Tensor)
    return hmpx.stochastic_round(x, seed=0, step=1, name="weight", offset=2)


def recipes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    recipe = hmpx.Recipe(opt_level=None, weights="nearest", kernels="auto", state_dtype="bfloat16")
    assert_type(hmpx.prepare(model, optimizer, recipe), tuple[torch.nn.Module, torch.optim.Optimizer])
    hmpx.prepare(model, optimizer, {"mixed_precision_config": {"use_fp32_grad_acc": True}})
    hmpx.prepare(model, optimizer, file)
    hmpx.prepare(model, optimizer, {"extends": file, "weights": "split"})
    hmpx.prepare(model, [optimizer, optimizer], "lean")
    hmpx.prepare(model, torch.optim.SGD(model.parameters()), "lean")
    assert_type(hmpx.Recipe.from_nxd({"use_master_weights": True}, with_zero=True), hmpx.Recipe)
    assert_type(recipe.bytes_per_parameter(), dict[str, float])
    assert_type(recipe.policy(), hmpx.Policy | None)
    with hmpx.activate("nxd-standard") as activation:
        assert_type(activation, hmpx.Activation)
        assert_type(activation.recipe, hmpx.Recipe)
    hmpx.explain(file)


def insight(model: torch.nn.Module, x: Tensor) -> list[str]:
    found = hmpx.compare(model, [(x,)], lambda model, x: model(x).sum(), lists="hmp-o1")
    assert_type(found, hmpx.Comparison)
    assert_type(found.worst(3), list[hmpx.Row])
    tuned = hmpx.tune(model, [(x,)] * 4, lambda model, x: model(x).sum(), tolerance=0.05)
    assert_type(tuned, hmpx.Tuned)
    assert_type(tuned.recipe, hmpx.Recipe)
    choices: tuple[hmpx.Choice, ...] = tuned.choices
    print(choices[0].reason)
    with hmpx.doctor(steps=3, at=[2]) as diagnosis:
        assert_type(diagnosis, hmpx.Diagnosis)
    assert_type(diagnosis.findings, list[hmpx.Finding])
    assert_type(diagnosis.recipe, hmpx.Recipe | None)
    with hmpx.record() as log:
        assert_type(log, hmpx.Log)
    assert_type(log.sites[0].op_seconds + log.sites[0].seconds, float)
    return [*log.escaped]


def errors() -> None:
    try:
        hmpx.convert(opt_level="O3")  # type: ignore[arg-type]  # mypy sees it before the program runs
    except (hmpx.UnknownOpError, hmpx.OptLevelError, hmpx.OpListError) as error:
        wrong: hmpx.HmpxError = error
        print(wrong)
    hmpx.convert(unknown="skip")  # type: ignore[arg-type]
    hmpx.convert(kernels="fp32")  # type: ignore[arg-type]
    hmpx.attach(torch.optim.SGD([]), weights="masters")  # type: ignore[arg-type]
    hmpx.Recipe(weights="masters")  # type: ignore[arg-type]
