"""Which kernels compute an op that runs in BF16 or FP16: torch's for that dtype, FP32 kernels, or products of hmpx.

What has to be computed in FP32 wherever it is called stands at the end (`in_fp32`).

A `Kernel` stands between the casts of a rule and torch's function. A caller does not see it: inputs and results have
the dtypes that the rule says.

FP32 kernels are for BF16 on a CPU without BF16 instructions, at the speed of FP32.

**The problem.** Without such instructions (AVX2: most laptops, desktops and cloud machines) torch's BF16 kernels are 2
to 50 times slower than its FP32 kernels, and so is everything built on them.

**The maths.** The product of two BF16 numbers is exact in FP32. A BF16 kernel that accumulates in FP32 and rounds its
result is therefore the FP32 kernel of the same inputs, with its result rounded. So an op whose inputs are BF16 is given
them in FP32, which changes no value, and its result is rounded. Autograd does the same to gradients: they are rounded
where a BF16 op would hand them on.

**What a caller sees** does not change: inputs and results are BF16. What the op keeps for its backward is FP32, which
takes more memory. FP16 is treated alike.

The ops that gain are in `op_facts.FP32_KERNELS`, which was measured. Everything else runs in native kernels: other ops,
other devices, tensor subclasses, sparse and nested tensors, ``out=``, in-place ops, and calls in `disable_casts()`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from hmpx.base.tensors import dtype_name, with_items
from hmpx.base.torch_private import PARAMETRIZATIONS, private
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.policy import LOW_RULES, Case, Rule
from hmpx.ops.wrapping.callers import frames
from hmpx.ops.wrapping.overriding import PLAIN, Kernel, call, may_override, out_of_graph, stand_in
from hmpx.ops.wrapping.rules import (
    ELIGIBLE,
    METHODS,
    TARGETS,
    autocast_inside,
    cast,
    eligible_dtypes,
    is_eligible,
    is_stated,
)
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.weight_cache import current, open_caches
from hmpx.ops.wrapping.wrappers import Patch, Patching, named_like, patch_of, uncast_inside

KernelsAsked = Literal["auto", "native", "float32", "scaled_mm"]
KERNELS: tuple[KernelsAsked, ...] = ("auto", "native", "float32", "scaled_mm")
GAINING = "matrix products, convolutions, attention, recurrences"  # `op_facts.FP32_KERNELS` in words
VARIABLE = "HMPX_KERNELS"  # an environment variable that says what "auto" means


@dataclass(frozen=True)
class Kernels:
    """The kernels of one conversion for ops that run in BF16 or FP16.

    asked: "auto", "native", "float32" or "scaled_mm". widened: the dtypes that FP32 kernels compute on a CPU.
    of_codes: how FP8 codes are multiplied there, "bfloat16", "float32" or "scaled_mm".
    """

    asked: KernelsAsked = "native"
    widened: frozenset[torch.dtype] = frozenset()
    of_codes: str = "bfloat16"

    def __str__(self) -> str:
        """Describe the kernels as part of a sentence."""
        return str(_fp32_kernel(self.widened)) if self.widened else "native kernels"

    def kernel(self, op: str, case: Case) -> Kernel | None:
        """Return the kernel of an op in one of its cases; None for torch's own."""
        if case.rule in (Rule.FP8, Rule.BF16_TO_FP32):
            from hmpx.ops.computing.matrix_products import fp8_kernel, wide_kernel  # which most programs never need

            return wide_kernel() if case.format is None else fp8_kernel(case.format, self.of_codes)
        if case.low is not None:
            return _kernel_inside(case.low, self.widened & {case.low})
        if op not in op_facts.FP32_KERNELS or case.rule in (None, Rule.FP32):
            return None
        inputs = self.widened & ({TARGETS[case.rule]} if case.rule in TARGETS else {*LOW_RULES})
        return _fp32_kernel(inputs) if inputs else None

    def of(self, op: str, cases: Iterable[Case]) -> list[Kernel]:
        """Return the kernels of all cases, each once."""
        return list(dict.fromkeys(kernel for case in cases if (kernel := self.kernel(op, case)) is not None))


NATIVE = Kernels()


def choose(asked: KernelsAsked) -> Kernels:
    """Return the kernels that `kernels=` means here; the environment variable HMPX_KERNELS stands for "auto".

    Raises:
        HmpxError: another word.
    """
    meant: str = asked
    said = f"kernels={asked!r}"
    if asked == "auto" and os.environ.get(VARIABLE):
        meant = os.environ[VARIABLE]
        said = f"{VARIABLE}={meant}"
    if meant not in KERNELS:
        raise HmpxError(f"{said} does not exist{did_you_mean(str(meant), KERNELS)} (legal: {', '.join(KERNELS)})")
    wide = [dtype for dtype in LOW_RULES if meant == "float32" or (meant == "auto" and not has_instructions(dtype))]
    of_codes = meant if meant == "scaled_mm" else "float32" if torch.bfloat16 in wide else "bfloat16"
    return Kernels(asked, frozenset(wide), of_codes)


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether this CPU has kernels made for BF16 or FP16, as far as torch can tell: True where it cannot."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return not torch.backends.mkldnn.is_available() or bool(private(f"torch.ops.mkldnn.{name}")())


def capability() -> str:
    """Describe this CPU, for the head of a table of figures."""
    has = " and ".join(rule.name for dtype, rule in LOW_RULES.items() if has_instructions(dtype))
    return f"{torch.backends.cpu.get_cpu_capability()}, kernels for {has or 'neither BF16 nor FP16'}"


# FP32 kernels

Tensor = torch.Tensor
_to_float, _float32, _strided = METHODS[torch.float32], torch.float32, torch.strided


def _fp32_kernel(inputs: frozenset[torch.dtype]) -> Kernel:
    names = " and ".join(rule.name for dtype, rule in LOW_RULES.items() if dtype in inputs)
    return Kernel(f"FP32 kernels for {names} on CPU", "too", lambda op, function: _computing(function, inputs))


def _kernel_inside(low: torch.dtype, widened: frozenset[torch.dtype]) -> Kernel:
    """Return torch's own op, with torch's own autocast on inside: it reaches the products of an op written in C++.

    An LSTM of oneDNN is one product to autocast. It is cast before torch asks whether oneDNN has it in `low`; inside,
    oneDNN would raise on a CPU without such instructions. widened: `low`, if FP32 kernels compute it.
    """

    def wrap(op: str, function: Callable) -> Callable:
        whole = (_computing(function, widened) if widened else function) if op == "lstm" else None

        @stand_in(function, computes=False)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if op in op_facts.BREAK_GRAPHS:  # before autocast is on
                return out_of_graph(autocast_inside, low, function, args, kwargs)
            if whole is not None and _runs_in_onednn(*args, **kwargs):
                return call(whole, cast(args, low), cast(kwargs, low))
            return autocast_inside(low, function, args, kwargs)

        return inside

    return Kernel(f"products inside in {dtype_name(low)}", "too", wrap)


def _runs_in_onednn(input: Any = None, hx: Any = None, *rest: Any, **more: Any) -> bool:
    """Return whether torch hands an LSTM with these arguments to oneDNN: no packed one, and none with projections."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if type(input) not in PLAIN or not input.is_cpu or input.dtype not in ELIGIBLE:
        return False
    return isinstance(hx, (list, tuple)) and hx[0].shape[-1] == hx[1].shape[-1]


def _computing(op: Callable, dtypes: frozenset[torch.dtype]) -> Callable:
    """Return `op` computed in FP32 for arguments of one of `dtypes`, with its result rounded to that dtype."""

    @stand_in(op)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if kwargs and is_stated(kwargs):
            return call(op, args, kwargs)
        widen = _widening()
        pairs: list[tuple[Tensor, Tensor]] = []
        wide_args = _widened(args, dtypes, widen, pairs)
        wide_values = _widened(kwargs.values(), dtypes, widen, pairs) if kwargs else []
        if not pairs or wide_args is None or wide_values is None:
            return call(op, args, kwargs)
        wide_kwargs = dict(zip(kwargs, wide_values, strict=True)) if kwargs else kwargs
        low = pairs[0][1].dtype
        return _narrowed(op(*wide_args, **wide_kwargs) if kwargs else op(*wide_args), low)

    return computed


_COMPUTED = next(each for each in _computing.__code__.co_consts if getattr(each, "co_name", "") == "computed")


def asked_of(frame: types.FrameType) -> torch.dtype | None:
    """Return the dtype of the op that an FP32 kernel computes in this frame or near it; None where none does."""
    return next((each.f_locals.get("low") for each in _computing_near(frame)), None)


def is_of_fp32_kernel(frame: types.FrameType) -> bool:
    """Return whether this frame calls an op by which an FP32 kernel widens, computes or rounds."""
    return any(_computing_near(frame))


def _computing_near(frame: types.FrameType) -> Iterator[types.FrameType]:
    return (each for each in itertools.islice(frames(frame), 6) if each.f_code is _COMPUTED)


def _widening() -> Callable[[Tensor], Tensor]:
    """Return the cast to FP32 for here: an op for the compiler, a look at kept casts, or torch's method."""
    if _by_ops():
        return torch.ops.hmpx.widen
    cache = current() if open_caches else None
    return _to_float if cache is None else cache.widen


def _by_ops() -> bool:
    """Return whether the casts are ops of ours: in compiled code, unless the program is to be loaded without hmpx."""
    return is_dynamo_compiling() and not is_exporting()


def _widened(
    values: Iterable[Any], dtypes: frozenset[torch.dtype], widen: Callable[[Tensor], Tensor], pairs: list
) -> list[Any] | None:
    """Return `values` with floating tensors in FP32, in lists and tuples too; None where FP32 kernels do not fit.

    They fit where these tensors are ordinary ones of a CPU, all of the same of the `dtypes`. `pairs` get each new
    tensor with its source.
    """
    low = pairs[0][1].dtype if pairs else None
    found = []
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            dtype = value.dtype
            if dtype in ELIGIBLE:
                if dtype is not low and (low is not None or dtype not in dtypes):
                    return None
                if not value.is_cpu or value.layout is not _strided or value.is_nested:
                    return None
                wide, low = widen(value), dtype
                pairs.append((wide, value))
                value = wide
        elif isinstance(value, (list, tuple)):
            if any(isinstance(item, Tensor) for item in value):
                items = _widened(value, dtypes, widen, pairs)
                if items is None:
                    return None
                value, low = with_items(value, items), pairs[0][1].dtype if pairs else None
        elif may_override(value):
            return None
        found.append(value)
    return found


def _narrowed(result: Any, low: torch.dtype) -> Any:
    if isinstance(result, Tensor):
        if result.dtype is not _float32:
            return result
        return torch.ops.hmpx.narrow(result, low) if _by_ops() else METHODS[low](result)
    return type(result)([_narrowed(item, low) for item in result]) if type(result) in (list, tuple) else result


# The two casts as ops that a compiler cannot look into: of two casts in a row it would drop both, and with them the
# rounding. Each is the gradient of the other.
if not hasattr(torch.ops.hmpx, "widen"):  # an earlier import of hmpx has made them
    _ops = torch.library.Library("hmpx", "FRAGMENT")
    _ops.define("widen(Tensor x) -> Tensor")
    _ops.define("narrow(Tensor x, ScalarType dtype) -> Tensor")
    _ops.impl("widen", lambda x: x.to(torch.float32), "CompositeExplicitAutograd")
    _ops.impl("narrow", lambda x, dtype: x.to(dtype), "CompositeExplicitAutograd")
    torch.library.register_fake("hmpx::widen", lambda x: torch.empty_like(x, dtype=torch.float32), lib=_ops)
    torch.library.register_fake("hmpx::narrow", lambda x, dtype: torch.empty_like(x, dtype=dtype), lib=_ops)
    torch.library.register_autograd(
        "hmpx::widen",
        lambda ctx, gradient: torch.ops.hmpx.narrow(gradient, ctx.low),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "low", inputs[0].dtype),
        lib=_ops,
    )
    torch.library.register_autograd(
        "hmpx::narrow", lambda ctx, gradient: (torch.ops.hmpx.widen(gradient), None), lib=_ops
    )
    torch.library.register_vmap("hmpx::widen", lambda info, dims, x: (torch.ops.hmpx.widen(x), dims[0]), lib=_ops)
    torch.library.register_vmap(
        "hmpx::narrow", lambda info, dims, x, dtype: (torch.ops.hmpx.narrow(x, dtype), dims[0]), lib=_ops
    )


# Computed in FP32 wherever it is called, with a result of its input's dtype: ops whose BF16 and FP16 kernels give
# garbage without an error (`op_facts.WRONG_IN_LOW`), and torch's own parametrizations. A weight of norm 1, or an
# orthogonal one, is so only to the precision in which it is made; a program makes it wherever it reads the weight, in a
# forward or outside. So this holds everywhere, in `disable_casts()` too


def in_fp32(function: Callable) -> Callable:
    """Return `function` computed in FP32 where it is given BF16 or FP16; its result is rounded to that dtype."""

    @functools.wraps(function)
    @stand_in(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        low = next((dtype for dtype in eligible_dtypes((*args, *kwargs.values())) if dtype in LOW_RULES), None)
        if low is None:
            return call(function, args, kwargs)
        args = tuple([cast(value, torch.float32) for value in args])
        kwargs = {key: cast(value, torch.float32) for key, value in kwargs.items()}
        return cast(call(function, args, kwargs), low)

    return wide


def parametrizations(switch: Switch) -> Iterator[Patch]:
    """Yield the patches of torch's own parametrizations: modules, and the older hooks."""
    for path in op_facts.PARAMETRIZATIONS if PARAMETRIZATIONS.is_on() else ():
        module, cls, method = path.rsplit(".", 2)
        owner = getattr(sys.modules[module], cls)
        yield patch_of(owner, method, path, Patching.FP32, functools.partial(_parametrization, path, switch))


def _parametrization(path: str, switch: Switch, original: Callable) -> Callable:
    """Return the method of a parametrization computed in FP32, with the tensors that its module holds."""
    wide = in_fp32(uncast_inside(original))

    def parametrization(self, *args, **kwargs):
        if switch.retired:
            return original(self, *args, **kwargs)
        # An older hook is given the layer, which holds the tensors under names that begin with the weight's.
        holder, prefix = (self, "") if isinstance(self, torch.nn.Module) else (args[0], f"{self.name}_")
        with _tensors_in_fp32(holder, prefix) as low:
            result = wide(self, *args, **kwargs)
        return result if low is None else cast(result, low)

    return named_like(parametrization, path, original)


@contextlib.contextmanager
def _tensors_in_fp32(module: torch.nn.Module, prefix: str) -> Iterator[torch.dtype | None]:
    """Let a module hold its BF16 and FP16 tensors in FP32, and give their dtype; None if there are none.

    What is written to a buffer meanwhile is rounded into it.
    """
    held = [
        (kind, name, own)
        for kind in ("_parameters", "_buffers")
        for name, own in vars(module)[kind].items()
        if name.startswith(prefix) and is_eligible(own) and own.dtype in LOW_RULES
    ]
    for kind, name, own in held:
        vars(module)[kind][name] = cast(own, torch.float32)
    try:
        yield held[0][2].dtype if held and prefix else None
    finally:
        for kind, name, own in held:
            tensors = vars(module)[kind]
            wide, tensors[name] = tensors[name], own
            if kind == "_buffers" and module.training:
                with torch.no_grad():
                    own.copy_(wide)
