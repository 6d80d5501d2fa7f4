"""Adds a note to torch's error if an op refuses BF16 or FP16: why its input has that dtype, and the cure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from hmpx import region_state
from hmpx.dtype_names import dtype_name

LOW = frozenset({torch.bfloat16, torch.float16})
_OF_DTYPES = re.compile("BFloat16|Half|dtype|[Ll]ow precision|float|not implemented")  # in torch's words


def explain(error: Exception, op: str, values: Iterable[Any]) -> None:
    """Add a note to `error`, which `op` raised, if one of its arguments is of low precision.

    Python 3.10 has no notes: there it is another line of the message.
    """
    low = next((v for v in values if isinstance(v, torch.Tensor) and v.dtype in LOW), None)
    if (
        low is None
        or not _OF_DTYPES.search(str(error))
        or not region_state.casts_on()
        or "hmpx:" in str((error.args, getattr(error, "__notes__", ())))
    ):
        return
    dtype = dtype_name(low.dtype)
    note = f"hmpx: the input of {op} is {dtype}{_origin(low)}, and torch has no {dtype} kernel of {op} here. "
    if "." in op:  # lists have no such name
        note += "Call it with input.float()."
    else:
        note += (
            f"Put it in the fp32 list: a line {op!r} in the file of fp32_file_path, fp32: [{op}] in a recipe, or "
            f"`with hmpx.casts(fp32=[{op!r}]):` around the call."
        )
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = ("\n".join((*map(str, error.args[:1]), note)), *error.args[1:])


def _origin(value: torch.Tensor) -> str:
    """The op that made a tensor, as far as autograd knows."""
    if isinstance(value, torch.nn.Parameter):
        return ", a parameter"
    node = value.grad_fn
    while node is not None and "ToCopy" in node.name() and node.next_functions:  # the cast of a result
        node = node.next_functions[0][0]
    if node is None or "AccumulateGrad" in node.name():
        return ""
    made_by = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return f", the result of {made_by}"
