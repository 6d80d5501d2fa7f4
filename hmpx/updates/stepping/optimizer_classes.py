"""What hmpx knows of optimizers by their class: what they read to update one weight, their formulas, their own code.

A step must copy to FP32 what the update of one weight reads, its *scope*:

``element``
    Each element by itself. The step runs on a few parameters, of a sharded one on what this rank holds.
``parameter``
    Each parameter by itself: factored moments, orthogonalised updates. The step runs on a few whole parameters.
``model``
    Across parameters, or nobody knows: every class that is not listed here, subclasses of listed ones included.

A class is listed, and then hmpx *knows* it, if its `step` does for each part exactly what it does for all; the tests
hold every entry against the plain step, bit for bit.

A formula says what the fused kernel of a class takes: its state tensors, and scalars made from a group's options. The
formulas are those of torch's classes and of `lion_pytorch`. `rounding/native_steps.c` has the loops, and explains each
number. To add an optimizer: "To change one thing" in `rounding/README.md`.

All of this holds for the code that the class came with. A script, or a library in it, may have replaced `AdamW.step`,
or `torch.optim.adam.adam`, which it calls. Such a step is of no known class: it is taken by its own code (`is_own`).
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import optim
from torch.optim import Optimizer

from hmpx.base.torch_private import private

SCOPES = {
    optim.Adadelta: "element",
    optim.Adagrad: "element",
    optim.Adam: "element",
    optim.AdamW: "element",
    optim.Adamax: "element",
    optim.ASGD: "element",
    optim.NAdam: "element",
    optim.RAdam: "element",
    optim.RMSprop: "element",
    optim.Rprop: "element",
    optim.SGD: "element",
    optim.Adafactor: "parameter",
    optim.Muon: "parameter",
}
_SCOPES_BY_NAME = {  # of packages that may not be there
    "lion_pytorch.lion_pytorch.Lion": "element",
    "transformers.optimization.Adafactor": "parameter",
}


def scope_of(optimizer: Optimizer, method: Callable | None = None) -> str:
    """``element``, ``parameter`` or ``model``. method: what is called, if it may be another than the class's step."""
    cls = type(optimizer)
    scope = SCOPES.get(cls) or _SCOPES_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}", "model")
    return scope if scope == "model" or is_own(cls, method) else "model"


def is_known(optimizer: Optimizer, method: Callable | None = None) -> bool:
    """Return whether hmpx knows what the step reads: it may then step a few parameters at a time."""
    return scope_of(optimizer, method) != "model"


_OF_MATRICES = re.compile(r"(?i:muon|shampoo|scion)|soap\b|Soap|SOAP")  # not IsoApg


def wants_bf16(optimizer: Optimizer) -> bool:
    """Return whether the class, or a base of it, is called Muon, SCION, SOAP or Shampoo: they want BF16 for codes.

    Muon brings all singular values of its momentum to one size, the small ones with the noise of 8 bits, which costs
    loss (figures: ``examples/bench/README.md``). One BF16 tensor takes as many bytes as two in 8 bits, which Adam has.
    Shampoo takes roots of inverses of state, which of a square weight has its shape, and SOAP turns moments into the
    directions of such state: the losses of a small network were 1.4 and 1.1 times as large in 8 bits, 4.5 and 2.5 times
    in 4 bits.
    """
    return any(_OF_MATRICES.search(cls.__name__) for cls in type(optimizer).__mro__)


def by_memory(*optimizers: Optimizer) -> bool:
    """Return whether a step may go through tensors in the order of memory, whatever their strides, as fused kernels do.

    It then gets weight, gradient and state in one layout. Any other step gets each in its own layout, so that sums over
    an element's neighbours come out as in a plain step.
    """
    return any(
        scope_of(optimizer) == "element" or any(group.get("fused") for group in optimizer.param_groups)
        for optimizer in optimizers
    )


State = Mapping[str, Any]
OWN = "amsgrad", "differentiable", "capturable"  # options of groups that get the optimizer's own step


class Formula:
    """One optimizer. The methods get one of `param_groups` and the number of the step, from 1.

    Attributes:
        kernel: its name in `eager.KERNELS`.
        counts: whether a parameter's state has a count of steps.
        tensors_alone: whether beside that its state is the kernel's tensors.
    """

    kernel: ClassVar[str]
    counts: ClassVar[bool] = True
    tensors_alone: ClassVar[bool] = True

    def supports(self, group: dict, state: State) -> bool:
        """Return whether the kernel supports these options."""
        return not any(map(group.get, OWN))

    def states(self, group: dict) -> tuple[str | None, ...]:
        """Return the keys of the state tensors, in the kernel's order; None for one that these options do not keep."""
        raise NotImplementedError

    def depends_on(self, state: State) -> Any:
        """Return the part of a parameter's state that the scalars depend on, beside the count of steps."""
        return None

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        """Return the kernel's scalars. seen: the result of `depends_on`."""
        raise NotImplementedError

    def extra_state(self, group: dict, step: float, seen: Any) -> State:
        """Return further state after the step: neither a tensor of the parameter's shape nor the count of steps."""
        return {}


def _sign(group: dict) -> float:
    return -1.0 if group.get("maximize") else 1.0


def _decay(group: dict, rate: float, decoupled: bool) -> tuple[float, float]:
    """Return two factors of the weight: for its share in the gradient, and for the weight itself."""
    decay = group["weight_decay"]
    return (0.0, 1.0 - rate * decay) if decoupled else (decay, 1.0)


class _Adam(Formula):
    kernel = "adam"

    def states(self, group: dict) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq"

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        rate = float(group["lr"])
        beta1, beta2 = map(float, group["betas"])
        correction = math.sqrt(1.0 - beta2**step)
        decay = _decay(group, rate, group.get("decoupled_weight_decay", False))
        rates = rate * correction / (1.0 - beta1**step), group["eps"] * correction
        return _sign(group), *decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, *rates


class _SGD(Formula):
    kernel = "sgd"
    counts = False

    def states(self, group: dict) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] else None,)

    def depends_on(self, state: State) -> bool:
        return state.get("momentum_buffer") is None

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: bool) -> tuple[float, ...]:
        momentum = float(group["momentum"])
        factors = (0.0, 1.0) if seen else (momentum, 1.0 - group["dampening"])
        plain = _sign(group), group["weight_decay"], float(group["lr"])
        return *plain, momentum if momentum else -1.0, *factors, float(group["nesterov"])


class _Lion(Formula):
    kernel = "lion"
    counts = False

    def states(self, group: dict) -> tuple[str | None, ...]:
        return ("exp_avg",)

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        rate, decay = group["lr"], group["weight_decay"]
        if getattr(optimizer, "decoupled_wd", False):
            decay /= optimizer._init_lr  # type: ignore[attr-defined]
        beta1, beta2 = group["betas"]
        return 1.0, 0.0, 1.0 - rate * decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, rate


class _Adagrad(Formula):
    kernel = "adagrad"

    def supports(self, group: dict, state: State) -> bool:
        return super().supports(group, state) and "sum" in state  # which the constructor has made

    def states(self, group: dict) -> tuple[str | None, ...]:
        return ("sum",)

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        rate = float(group["lr"]) / (1.0 + (step - 1.0) * group["lr_decay"])
        return _sign(group), group["weight_decay"], rate, group["eps"]


class _RMSprop(Formula):
    kernel = "rmsprop"

    def states(self, group: dict) -> tuple[str | None, ...]:
        momentum = "momentum_buffer" if group["momentum"] > 0 else None
        return "square_avg", momentum, "grad_avg" if group["centered"] else None

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        alpha, momentum = group["alpha"], group["momentum"]
        averages = alpha, 1.0 - alpha, group["eps"], momentum if momentum > 0 else -1.0, float(group["centered"])
        return _sign(group), group["weight_decay"], float(group["lr"]), *averages


class _NAdam(Formula):
    kernel = "nadam"
    tensors_alone = False

    def states(self, group: dict) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq"

    def depends_on(self, state: State) -> float:
        """Return the product of momenta so far."""
        return state["mu_product"].item() if "mu_product" in state else 1.0

    def scalars(self, optimizer: Optimizer, group: dict, step: float, seen: float) -> tuple[float, ...]:
        rate = float(group["lr"])
        beta1, beta2 = group["betas"]
        now, then = _momentum(group, step), _momentum(group, step + 1.0)
        product = seen * now
        averages = 1.0 - beta1, beta2, 1.0 - beta2
        rates = rate * (1.0 - now) / (1.0 - product), rate * then / (1.0 - product * then)
        decay = _decay(group, rate, group["decoupled_weight_decay"])
        return _sign(group), *decay, *averages, *rates, group["eps"], 1.0 - beta2**step

    def extra_state(self, group: dict, step: float, seen: float) -> State:
        return {"mu_product": torch.tensor(seen * _momentum(group, step), dtype=torch.float32)}


def _momentum(group: dict, step: float) -> float:
    """Return NAdam's momentum in one step."""
    return group["betas"][0] * (1.0 - 0.5 * 0.96 ** (step * group["momentum_decay"]))


_FORMULAS: dict[type, Formula] = {
    optim.Adagrad: _Adagrad(),
    optim.Adam: _Adam(),
    optim.AdamW: _Adam(),
    optim.NAdam: _NAdam(),
    optim.RMSprop: _RMSprop(),
    optim.SGD: _SGD(),
}
_FORMULAS_BY_NAME: dict[str, Formula] = {"lion_pytorch.lion_pytorch.Lion": _Lion()}  # of packages that may not be there
FUSED = ", ".join((*(cls.__name__ for cls in _FORMULAS), "Lion of lion_pytorch"))


def formula_of(optimizer: Optimizer) -> Formula | None:
    """Return the formula of the optimizer's class; None if there is no kernel for it, or its step is replaced."""
    cls = type(optimizer)
    formula = _FORMULAS.get(cls) or _FORMULAS_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
    return formula if formula is not None and is_own(cls) else None


def formula_used(optimizer: Optimizer, fused: bool | None) -> Formula | None:
    """Return the formula of the next step, with the setting `fused`; None for the optimizer's own step."""
    return None if fused is False or is_scaled(optimizer) else formula_of(optimizer)


def is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler leaves the unscaling to torch's own kernels: it then sets these attributes.

    It does so where the class says that it can; another class's attributes of these names are its own.
    """
    names = ("grad_scale", "found_inf") if getattr(optimizer, "_step_supports_amp_scaling", False) else ()
    return any(getattr(optimizer, name, None) is not None for name in names)


# Whether the code of a step is the one that its class came with. Who made a function is asked of its globals, and not
# of its name, which `functools.wraps` copies.
HOOK = "torch.optim.Optimizer.profile_hook_step"


def _own(optimizer: Optimizer) -> None: ...


_hooked = private(HOOK)(_own)
_HOOKED = _hooked.__code__  # every wrapper of torch has this code; `_PLACE`: the own function's index in its closure
_PLACE = [cell.cell_contents for cell in _hooked.__closure__].index(_own)
_PUBLISHERS = {"hmpx", "torch", *sys.stdlib_module_names} - {"functools"}

# By class: its step, the function that this comes to, and where all functions are that it calls; None: another's step.
_known: dict[type, tuple[Any, Callable, list[tuple[Mapping[str, Any], str, Any]]] | None] = {}


def cell_of(step: Any) -> types.CellType | None:
    """Return the cell that holds a class's own `step`. In some classes, such as LBFGS, Dynamo wraps torch's wrapper."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None) if _publisher(step) == "torch" else None
    return None if step is None else step.__closure__[_PLACE]


def own_step(cls: type[Optimizer]) -> Callable:
    """Return the step function of an optimizer class, without the wrappers of torch and hmpx."""
    cell = cell_of(cls.step)
    own: Any = cls.step if cell is None else cell.cell_contents
    return own.__hmpx_original__ if is_watched(own) else own


def is_watched(step: Any) -> bool:
    """Return whether hmpx stands around this function."""
    return hasattr(step, "__hmpx_original__") and _publisher(step) == "hmpx"


def is_own(cls: type[Optimizer], method: Callable | None = None) -> bool:
    """Return whether the step of a class, or `method`, came with it, with all that it calls in its module."""
    known = _known.get(cls)
    if known is None or cls.step is not known[0] or not all([held.get(name) is v for held, name, v in known[2]]):
        step = own_step(cls)
        found = list(_called(cls, step))
        _known[cls] = known = None if None in found else (cls.step, step, [each for each in found if each is not None])
    return known is not None and (method is None or method is known[1])


def _called(cls: type, step: Callable) -> Iterator[tuple[Mapping[str, Any], str, Any] | None]:
    """Yield where the functions are that a step calls in its module, itself included; None for one of another's."""
    bases = [base for base in cls.__mro__ if base not in (Optimizer, object)]
    function = _innermost(step, bases[0].__module__)
    home = next((base for base in bases if f"{base.__qualname__}.step" == getattr(function, "__qualname__", "")), None)
    if home is None or function.__globals__.get(home.__name__) is not home:
        yield None
        return
    seen, codes = set[str](), [function.__code__]
    module = function.__globals__
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in set(code.co_names) - seen:
            seen.add(name)
            for held in (module, *map(vars, bases)):
                value = held.get(name)
                if value is None or isinstance(value, type) or not callable(value):
                    continue
                inner = _innermost(value, module["__name__"])
                yield None if inner is None else (held, name, value)
                if isinstance(inner, types.FunctionType) and inner.__globals__ is module:
                    codes.append(inner.__code__)


def _innermost(value: Any, module: str) -> Any:
    """Return the function that others wrap; None if one of them is neither of this module's package nor of Python."""
    while _publisher(value) in {*_PUBLISHERS, module.partition(".")[0]}:
        if not hasattr(value, "__wrapped__"):
            return value
        value = value.__wrapped__
    return None


def _publisher(value: Any) -> str:
    """Return the first part of the name of the module whose code this is."""
    module = getattr(value, "__globals__", {}).get("__name__") or type(value).__module__
    return str(module).partition(".")[0]


def replaced_step(optimizer: Optimizer) -> Callable | None:
    """Return the `step` that somebody has put on the optimizer itself; None for torch's LR schedulers, which count."""
    step = each = vars(optimizer).get("step")
    while each is not None:
        each = getattr(each, "__func__", each)
        if each is type(optimizer).step or is_watched(each):
            return None
        each = getattr(each, "__wrapped__", None) if _publisher(each) == "torch" else None
    return step
