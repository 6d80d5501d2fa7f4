"""Which kernels compute an op that runs in BF16 or FP16: torch's for that dtype, FP32 kernels, or products of hmpx.

A `Kernel` stands between the casts of a rule and torch's function. A caller does not see it: inputs and results have
the dtypes that the rule says. It says what its `inputs` are and how its `backward` computes, and prints in words.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Literal

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.computing import fp32_kernels
from hmpx.ops.computing.fp32_kernels import Fp32Kernel
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.policy import LOW_RULES, Case, Rule
from hmpx.ops.wrapping.rules import TARGETS

if TYPE_CHECKING:
    from hmpx.ops.computing.matrix_products import Fp8Kernel, WideKernel

    Kernel = Fp32Kernel | Fp8Kernel | WideKernel

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
        return str(Fp32Kernel(self.widened)) if self.widened else "native kernels"

    def kernel(self, op: str, case: Case) -> Kernel | None:
        """Return the kernel of an op in one of its cases; None for torch's own."""
        if case.rule in (Rule.FP8, Rule.BF16_TO_FP32):
            from hmpx.ops.computing.matrix_products import Fp8Kernel, WideKernel  # which most programs never need

            return WideKernel() if case.format is None else Fp8Kernel(case.format, self.of_codes)
        if op not in op_facts.FP32_KERNELS or case.rule in (None, Rule.FP32):
            return None
        inputs = self.widened & ({TARGETS[case.rule]} if case.rule in TARGETS else {*LOW_RULES})
        return Fp32Kernel(inputs) if inputs else None

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
    return not torch.backends.mkldnn.is_available() or bool(getattr(torch.ops.mkldnn, name)())


def capability() -> str:
    """Describe this CPU, for the head of a table of figures."""
    has = " and ".join(rule.name for dtype, rule in LOW_RULES.items() if has_instructions(dtype))
    return f"{torch.backends.cpu.get_cpu_capability()}, kernels for {has or 'neither BF16 nor FP16'}"


def is_computing(frame: FrameType) -> bool:
    """Return whether a kernel of hmpx computes an op in `frame`, or no list casts it, since its gradient is sparse."""
    from hmpx.ops.computing import in_fp32, matrix_products
    from hmpx.ops.wrapping import refusals

    return frame.f_code in (fp32_kernels.COMPUTED, in_fp32.COMPUTED, matrix_products.COMPUTED, refusals.TOLD)
