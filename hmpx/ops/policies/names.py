"""Names that a list may have: of ops, and of functions outside torch. A wrong one is answered with what it may mean."""

from __future__ import annotations

import importlib.util
import sys

import torch

from hmpx.errors import did_you_mean
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, legal_names, retired


def is_op(name: str) -> bool:
    """Return whether the canonical name is that of an op, be it one that only aten has."""
    return name in catalog() or aten_only(name)


def may_be_user_function(name: str) -> bool:
    """Return whether a dotted name may be a function outside torch; `linear.x` only if a module `linear` exists."""
    top, _, rest = name.partition(".")
    if not rest or top == "torch" or _within_torch(name):
        return False
    return top not in legal_names() or top in sys.modules or importlib.util.find_spec(top) is not None


# As papers and other libraries have them, without underscores. A name that is spelt alike is found without this.
_ELSEWHERE = {
    **dict.fromkeys(("attention", "sdpa", "selfattention", "flashattention"), "scaled_dot_product_attention"),
    **dict.fromkeys(("multiheadattention", "mha"), "multi_head_attention_forward"),
    **dict.fromkeys(("dense", "fc", "fullyconnected"), "linear"),
    **dict.fromkeys(("ce", "celoss", "xent", "softmaxcrossentropy", "crossentropyloss"), "cross_entropy"),
    **dict.fromkeys(("bce", "bceloss"), "binary_cross_entropy"),
    **dict.fromkeys(("batchmatmul", "batchedmatmul"), "bmm"),
    **dict.fromkeys(("mse", "l2loss"), "mse_loss"),
    **dict.fromkeys(("bcewithlogits", "bcewithlogitsloss"), "binary_cross_entropy_with_logits"),
    **{"gemm": "mm", "swish": "silu", "nll": "nll_loss", "klloss": "kl_div", "kldivloss": "kl_div"},
    **{"gels": "linalg_lstsq", "lstsq": "linalg_lstsq", "symeig": "linalg_eigh"},
}


def unknown_op(name: str) -> str:
    """Return the message for an unknown name."""
    if retired(canonical(name)):
        return (
            f"torch {torch.__version__} has removed {name!r}: here the line does nothing (an older torch may have it)"
        )
    in_place = name.removesuffix("_")
    if in_place != name and in_place in legal_names():
        return f"{name!r} writes to its input and keeps its dtype; list {in_place!r} for the op"
    spelling = name.rpartition(".")[2] or name
    meant = _ELSEWHERE.get(spelling.lower().replace("_", ""))
    if isinstance(vars(torch.nn).get(spelling), type):
        hint = did_you_mean(spelling, legal_names(), cutoff=0.8, meant=meant)
        return f"{name!r} is a class, and a list names functions{hint or ': list the functions that its forward calls'}"
    return f"unknown op {name!r}{did_you_mean(spelling, legal_names(), meant=meant)}"


def _within_torch(name: str) -> bool:
    """Return whether a dotted name begins with a usual name of torch's modules: ``nn.``, ``F.``."""
    return name.startswith(("nn.", "F.", "functional."))
