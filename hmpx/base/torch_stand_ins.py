"""What serves in the place of names that torch does not document, where the installed torch lacks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ByName(type):
    """Makes classes whose instances are those of a class of torch with the same name, wherever it stands."""

    def __instancecheck__(cls, value: object) -> bool:
        return any(each.__name__ == cls.__name__ for each in type(value).__mro__)


def schemas(qualified: str) -> list[Any]:
    packet = getattr(torch.ops.aten, qualified.removeprefix("aten::"), None)
    return [] if packet is None else [getattr(packet, each)._schema for each in packet.overloads()]


def on_each(name: str) -> Callable:
    """An operation on each tensor of a list, with one other for all of them, or with one for each."""
    operate = getattr(torch.Tensor, name)

    def operate_each(many: list[torch.Tensor], *others: Any, **kwargs: Any) -> list[torch.Tensor]:
        columns = [other if isinstance(other, list | tuple) else [other] * len(many) for other in others]
        return [operate(*row, **kwargs) for row in zip(many, *columns, strict=True)]

    return operate_each


def hooked(step: Callable) -> Any:
    made: Any = type("Made", (torch.optim.Optimizer,), {"step": step})
    made([torch.zeros(1)], {})
    return made.step


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX"))
