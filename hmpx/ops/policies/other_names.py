"""Guesses which op an unknown name means: the class of a module, or another library's name."""

from __future__ import annotations

import functools
import inspect
import re

import torch

from hmpx.ops.policies.catalog import catalog

# As papers and other libraries have them. What is spelt alike (`layernorm`) is found without this.
_ELSEWHERE = {
    **dict.fromkeys(("attention", "sdpa", "self_attention", "flash_attention"), "scaled_dot_product_attention"),
    **dict.fromkeys(("multihead_attention", "mha"), "multi_head_attention_forward"),
    **dict.fromkeys(("dense", "fc", "fully_connected"), "linear"),
    **dict.fromkeys(("ce", "ce_loss", "xent", "softmax_cross_entropy"), "cross_entropy"),
    **dict.fromkeys(("bce", "bce_loss"), "binary_cross_entropy"),
    "bce_with_logits": "binary_cross_entropy_with_logits",
    **dict.fromkeys(("batch_matmul", "batched_matmul"), "bmm"),
    "gemm": "mm",
    "swish": "silu",
    "nll": "nll_loss",
    **dict.fromkeys(("mse", "l2_loss"), "mse_loss"),
    "kl_loss": "kl_div",
}
_NAMESPACES = ("torch.nn.functional.", "torch.nn.", "nn.functional.", "nn.", "F.")
_CALL = re.compile(r"\b(F|torch|_VF)\.(\w+)\(")
_OWN_METHOD = re.compile(r"\bself\.(\w+)\(")


def within_torch(name: str) -> bool:
    """Whether a dotted name begins with a usual name of torch's modules: ``nn.``, ``F.``."""
    return name.startswith(("nn.", "F.", "functional."))


def module_class(name: str) -> type | None:
    """The class of `torch.nn` that a name stands for: ``Linear``, ``nn.Linear``, ``torch.nn.Linear``."""
    bare = next((name.removeprefix(prefix) for prefix in _NAMESPACES if name.startswith(prefix)), name)
    found = vars(torch.nn).get(bare.rpartition(".")[2])
    return found if isinstance(found, type) and issubclass(found, torch.nn.Module) else None


def op_meant(name: str) -> str | None:
    """The op that `name` probably means; None if nothing but its spelling tells."""
    if cls := module_class(name):
        return op_of(cls)
    bare = name.rpartition(".")[2].lower()
    return _ELSEWHERE.get(bare) or _ops_of_classes().get(bare.replace("_", ""))


@functools.cache
def _ops_of_classes() -> dict[str, str]:
    """Of the modules in `torch.nn`, in small letters: ``{"bceloss": "binary_cross_entropy", ...}``."""
    classes = {name: cls for name in vars(torch.nn) if (cls := module_class(name))}
    return {name.lower(): op for name, cls in classes.items() if (op := op_of(cls))}


def op_of(cls: type) -> str | None:
    """The op that the forward of a module calls, read in its source; None where it has several parts or no source."""
    methods = ["forward"]
    for method in methods:
        try:
            source = inspect.getsource(getattr(cls, method))
        except (AttributeError, OSError, TypeError):
            continue
        calls = [(module, op) for module, op in _CALL.findall(source) if op in catalog()]
        functional = next((op for module, op in calls if module != "torch"), None)
        found = functional or next((op for _, op in calls if catalog()[op].computes), None)
        if found:
            return found
        methods += [name for name in _OWN_METHOD.findall(source) if name not in methods]
    return None
