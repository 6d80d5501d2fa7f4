"""One forward and backward pass of a model, and in words how two of them differ."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import hmpx
from tests.downstream.by_hand import AUTOCASTS
from tests.downstream.zoo import ZOO, floating

under_autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
under_its_lists = functools.partial(hmpx.convert, **AUTOCASTS, where="model")


def made(name: str) -> tuple[nn.Module, dict]:
    """A model of the zoo in training mode, dropout included, and its inputs."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    return model.train(), inputs


@dataclass
class Pass:
    """What a pass gave: outputs in order, gradients and buffers by name."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.outputs, **self.gradients, **self.buffers}


def run(model: nn.Module, inputs: dict, around: Callable = contextlib.nullcontext) -> Pass:
    """Forward inside of `around()`, backward of the outputs' mean squares after it; the model stays as it was."""
    torch.manual_seed(1)
    state = copy.deepcopy(model.state_dict())
    with around():
        outputs = floating(model(**inputs))
    sum(output.float().square().mean() for output in outputs if output.requires_grad).backward()
    found = Pass(
        {f"output {i}": output.detach() for i, output in enumerate(outputs)},
        {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None},
        {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    )
    model.zero_grad()
    model.load_state_dict(state)
    return found


def differences(expected: Pass, got: Pass) -> list[str]:
    """Each tensor that differs in dtype or bits; empty where the passes are equal."""
    first, second = expected.tensors(), got.tensors()
    found = [f"{name} is only in one" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        if first[name].dtype is not second[name].dtype:
            found.append(f"{name}: {first[name].dtype} became {second[name].dtype}")
        elif not torch.equal(_bits(first[name]), _bits(second[name])):
            found.append(f"{name}: other bits")
    return sorted(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def held_functions(model: nn.Module) -> dict[str, int]:
    """Which functions the modules hold in attributes: what `convert` rebinds and `restore` puts back."""
    return {
        f"{name}.{attribute}": id(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if callable(value)
    }
