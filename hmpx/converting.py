"""`convert` puts casts into torch, and `restore` takes all of them away.

Whatever can fail (a list that cannot be read, a name that does not exist) fails before torch is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hmpx.base import installation, process_state
from hmpx.base.garbage import none_collected
from hmpx.conversion import Conversion, install
from hmpx.errors import OpListError, with_hints
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.overlays import with_names
from hmpx.ops.policies.build_policy import Unknown, build_policy
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.policies.lists import SIDES, read_lists
from hmpx.ops.policies.policy import OptLevel, Where
from hmpx.updates import step_hooks
from hmpx.updates.attach import detach


@with_hints
def convert(
    opt_level: OptLevel = "O1",
    bf16_file_path: str | os.PathLike[str] | None = "",
    fp32_file_path: str | os.PathLike[str] | None = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | os.PathLike[str] | None = "",
    fp8_file_path: str | os.PathLike[str] | None = "",
    bf16: Iterable[str] | None = None,
    fp32: Iterable[str] | None = None,
    promote: Iterable[str] | None = None,
    fp8: Iterable[str] | None = None,
    fp8_format: Format | str | Mapping[str, Any] | None = None,
    unknown: Unknown = "error",
    enabled: bool = True,
    low_precision: torch.dtype | str | None = None,
    dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
    kernels: KernelsAsked = "auto",
    where: Where = "everywhere",
) -> Conversion:
    """Run torch's ops in the precision that op lists say.

    A second call replaces the first one; as a ``with`` statement, it does so until the end of the block.

    Args:
        opt_level: "O1": the lists decide. "O2": convolutions, linear and matrix products in BF16, every other op that
            computes in FP32; no list may be given.
        bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path: op list files, read before the call returns.
            ``""`` and None stand for the default list. A YAML or JSON file given for one side also fills the sides not
            given.
        bf16, fp32, promote, fp8: the same lists, name by name, in the place of a file.
        fp8_format: how ops in the fp8 list are multiplied: "tensorwise", "rowwise", "blockwise", "mx", "mx-floor", of
            four bits "mxfp4" and "nvfp4", or keys, as in ``{"scaling": "rowwise", "backward": "e4m3"}``. None: what a
            list file says, else "tensorwise". Inputs, results and gradients are in BF16.
        isVerbose: log each distinct decision once (logger "hmpx"), with the line of the caller's code.
        unknown: what an unknown name in a list is: "error", or "warn" to skip it.
        enabled: True casts everywhere except in `disable_casts()` regions; False only in `enable_casts()` regions.
        low_precision: torch.bfloat16 or torch.float16: the dtype for ops in the bf16 list and for those of O2. With
            FP16, scale the loss (`torch.amp.GradScaler`). None: what a list file says, else torch.bfloat16.
        dtype_map: replaces a dtype wherever the program asks for it: torch.float32 and torch.float64 by torch.bfloat16
            and torch.float32. It acts on the default dtype, factory functions, ``x.float()``, ``x.double()``,
            ``x.to(dtype)``, ``dtype=``, module construction, `torch.load` and NumPy arrays, and not inside
            `disable_casts()` and optimizer steps.
        kernels: which kernels compute BF16, FP16 and FP8 ops on a CPU. "native": torch's kernels for that dtype, with
            the bits of torch.autocast. "float32": FP32 kernels on the same BF16 inputs, for matrix products,
            convolutions, attention and recurrences; results and gradients are rounded to BF16. "auto": "float32" for
            a dtype that the CPU has no instructions for (native kernels take up to 50 times as long there), else
            "native". "scaled_mm": "native", with torch's own FP8 product for the fp8 list, as a reference; otherwise
            FP8 codes are multiplied in BF16, or under "float32" in FP32. An NVIDIA GPU with FP8 tensor cores (sm_89 and
            later) multiplies codes on them, whatever is said here; an older GPU in BF16, which is logged at INFO. Other
            devices, ``out=``, in-place ops, tensor subclasses and `disable_casts()` always use native kernels.
        where: "everywhere" casts each call of a listed op, whoever makes it, as HMP did. "model" casts the ops of
            models: those called while the forward of a module with parameters runs in this thread; those with a tensor
            that requires a gradient, while grad mode is on; losses (ops with a `reduction`); and ops of the fp32 list
            wherever BF16 or FP16 comes. What else a program computes (data, timesteps, averages of weights, metrics)
            is left to torch, unless torch would raise because other casts have made the dtypes of its tensors differ.
            Hooks of gradients and data loading are left to torch either way. Regions (`enable_casts`, `casts`) act
            wherever they stand.

    Returns:
        A handle: `policy`, `patched`, `rebound`, `escaped`, `restore()`, and ``with convert(...):``.

    Raises:
        OpListError, UnknownOpError, OptLevelError: a list or level is wrong. HmpxError: so is another argument. Nothing
            is changed then, and an earlier conversion stays in force.

    Example:
        >>> handle = hmpx.convert()
        >>> logits = model(inputs)
        >>> logits.dtype, logits.softmax(-1).dtype
        (torch.bfloat16, torch.float32)
        >>> hmpx.restore()
    """
    with none_collected():
        files = (bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path)
        paths = dict(zip(SIDES, files, strict=True))
        names = dict(zip(SIDES, (bf16, fp32, promote, fp8), strict=True))
        if both := [side for side in paths if paths[side] and names[side] is not None]:
            raise OpListError(f"hmpx.convert: {both[0]} and {both[0]}_file_path: which of the two?")
        lists = with_names(read_lists(*paths.values()), names, sys._getframe(1))
        if fp8_format is not None:
            lists = replace(lists, fp8_format=Format.of(fp8_format))
        policy = build_policy(opt_level, lists, unknown, low_precision)
        return install(policy, isVerbose, enabled, dtype_map, kernels, where=where)


def restore(*optimizers: torch.optim.Optimizer) -> None:
    """Put torch back exactly as it was, optimizer steps too unless a region is open or an optimizer attached.

    Args:
        optimizers: optimizers to detach too (`hmpx.detach`), which drops masters and rounds state to the dtype of the
            parameters. All others stay attached. After ``hmpx.prepare(model, optimizer, ...)``,
            ``hmpx.restore(optimizer)`` undoes everything except the dtype of the parameters. While other models are
            prepared, torch stays converted for these: the restored model is left uncast, and theirs are as before.

    Example:
        >>> before = id(torch.matmul)
        >>> handle = hmpx.convert()
        >>> id(torch.matmul) == before
        False
        >>> hmpx.restore()
        >>> id(torch.matmul) == before
        True
    """
    with process_state.lock:  # another thread may prepare a model meanwhile
        if not (process_state.prepared and _leave(optimizers)):
            installation.end_all()
            process_state.prepared.clear()
    for optimizer in optimizers:
        detach(optimizer)
    step_hooks.uninstall()


def _leave(optimizers: tuple[torch.optim.Optimizer, ...]) -> bool:
    from hmpx.recipes.prepared import leave  # a program that prepares nothing needs no recipes

    return leave(optimizers)
