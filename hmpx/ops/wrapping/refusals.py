"""Wrappers of ops that go wrong on BF16 or FP16.

If torch has no kernel of the op for that dtype, its error gets a note: why the input has that dtype, and the way out.
If rounded input makes the result wrong without an error (`binary_cross_entropy`), the call is an error of hmpx.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hmpx.base import region_state
from hmpx.base.tensors import dtype_name
from hmpx.errors import HmpxError
from hmpx.ops.policies.policy import LOW_RULES, Rule
from hmpx.ops.wrapping.callers import pass_over
from hmpx.ops.wrapping.overriding import stand_in
from hmpx.ops.wrapping.rules import TARGETS, eligible_dtypes
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import named_like

logger = logging.getLogger("hmpx")
_OF_DTYPES = re.compile("BFloat16|Half|dtype|[Ll]ow precision|float|not implemented")  # in torch's words


def build_explaining(op: str, label: str, original: Callable, run: Callable) -> Callable:
    """Return `run`, a wrapper of an op that may have no BF16 kernel, with the way out in its error."""

    def explaining(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            _explain(error, op, (*args, *kwargs.values()))
            raise

    pass_over(explaining.__code__)
    return named_like(explaining, label, original)


def build_refusing(
    op: str, label: str, original: Callable, run: Callable, switch: Switch, instead: str, asked: bool
) -> Callable:
    """Return `run`, a wrapper of an op that is unsafe on rounded input, with an error for a BF16 or FP16 first input.

    instead: the op that is safe. asked: a list of the user's own names the op, so that this is a warning, once.
    """
    warned = False

    def refusing(*args, **kwargs):
        nonlocal warned
        value = args[0] if args else kwargs.get("input")
        if isinstance(value, torch.Tensor) and value.dtype in LOW_RULES and not (switch.casts_off() or warned):
            dtype = dtype_name(value.dtype)
            message = (
                f"{op} of {dtype} probabilities: .999 is 1 in {dtype}, so that a confident wrong answer has loss 100 "
                f"and gradient 0; use {instead} on the logits"
            )
            if not asked:
                raise HmpxError(f"{message}, or compute the sigmoid in float32")
            logger.warning("hmpx: %s", message)
            warned = True
        return run(*args, **kwargs)

    pass_over(refusing.__code__)
    return named_like(refusing, label, original)


def build_telling(op: str, rule: Rule | None, function: Callable) -> Callable:
    """Return `function`, called where the gradient of an op is sparse, with a warning, once, if a list asks for a cast.

    rule: of the list.
    """
    told, target = False, TARGETS.get(rule) if rule else None

    @stand_in(function)
    def telling(*args, **kwargs):
        nonlocal told
        found = eligible_dtypes((*args, *kwargs.values()))
        if not told and found and target not in (None, found[0]):
            told = True
            logger.warning(
                "hmpx: %s is in the %s list, and its gradient is sparse: its weight stays %s, since torch cannot send "
                "a sparse gradient through a cast; for the cast, make it with sparse=False",
                *(op, rule, dtype_name(found[0])),
            )
        return function(*args, **kwargs)

    return telling


def _explain(error: Exception, op: str, values: Iterable[Any]) -> None:
    """Add a note to `error`, which `op` raised, if one of its arguments is of low precision.

    Python 3.10 has no notes: there it is another line of the message.
    """
    low = next((v for v in values if isinstance(v, torch.Tensor) and v.dtype in LOW_RULES), None)
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
    """Return the op that made a tensor, as far as autograd knows."""
    if isinstance(value, torch.nn.Parameter):
        return ", a parameter"
    node = value.grad_fn
    while node is not None and "ToCopy" in node.name() and node.next_functions:  # the cast of a result
        node = node.next_functions[0][0]
    if node is None or "AccumulateGrad" in node.name():
        return ""
    made_by = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return f", the result of {made_by}"
