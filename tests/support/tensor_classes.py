"""Classes of tensors that override torch's functions."""

from __future__ import annotations

import torch


class Recording(torch.Tensor):
    """Sees every function of torch that it is given to."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Asks(torch.Tensor):
    """Asks whether it is handed `torch.nn.functional.linear`, each subclass in its way.

    `recognised`: the names of the functions that it has recognised, for which it returns their first argument.
    """

    recognised: list[str]

    def __init_subclass__(cls):
        cls.recognised = []

    @classmethod
    def recognises(cls, func):
        return False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if cls.recognises(func):
            cls.recognised.append(func.__name__)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def by_name(operator):
    """A class that asks by name in its own ``__torch_function__``, or in a method that this calls."""

    class Is(Asks):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear:
                cls.recognised.append(func.__name__)
                return args[0]
            return super().__torch_function__(func, types, args, kwargs or {})

    class Equals(Asks):
        @classmethod
        def recognises(cls, func):
            return func.__name__ == "linear" and torch.nn.functional.linear == func

    class In(Asks):
        @classmethod
        def recognises(cls, func):
            return func in (torch.nn.functional.relu, torch.nn.functional.linear)

    return {"is": Is, "==": Equals, "in": In}[operator]


def is_linear(func):
    return func is torch.nn.functional.linear


class ByImport(Asks):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from tests.support.tensor_classes import is_linear

        if is_linear(func):
            cls.recognised.append(func.__name__)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class RoundsWeights(torch.nn.Parameter):
    """Rounds a weight to 1/4 for `linear`, which it asks for by name; what torch makes of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            return torch.nn.functional.linear(x, quarters(weight), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


class RoundsByTable(torch.Tensor):
    """The same for `linear` and `matmul`, which it has in a table."""

    table = {torch.nn.functional.linear, torch.Tensor.matmul, torch.matmul}  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.table:
            args = [quarters(each) if isinstance(each, cls) else each for each in args]
            return torch.nn.functional.linear(*args) if "linear" in func.__name__ else torch.matmul(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class KnowsLinear(torch.Tensor):
    """Rounds weights for `linear`, and knows no other function: not what reads a dtype, nor what casts."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in {torch.nn.functional.linear}:
            raise RuntimeError(f"{func.__name__} is not known")
        x, weight, *bias = args
        return torch.nn.functional.linear(x, quarters(weight), *bias)


class Forgetful(torch.Tensor):
    """Gives plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def quarters(weight):
    """By numpy, which no list of ops has a word for."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.from_numpy((weight.detach().numpy() * 4).round() / 4)
