"""What torch's dispatcher runs, by the user's line: what `record` is held against."""

from __future__ import annotations

import os
import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx

LIBRARIES = (*(os.path.dirname(module.__file__) + os.sep for module in (torch, hmpx)), "<hmpx")
NO_OPS = set(  # views and factories, and parts of other ops
    "view _unsafe_view transpose t permute reshape expand slice select unsqueeze squeeze unbind as_strided alias clone "
    "stack arange zeros empty full ones copy_ new_zeros detach _log_softmax _local_scalar_dense".split()
)


class Seen(TorchDispatchMode):
    """The dtypes of the floating inputs of each aten op of a forward pass, and casts, by the line outside of torch."""

    def __init__(self):
        super().__init__()
        self.ops, self.casts, self.bytes = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        name, at = func._schema.name.removeprefix("aten::"), f"{frame.f_code.co_filename}:{frame.f_lineno}"
        tensors = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name == "_to_copy":
            if tensors and tensors[0].dtype is not result.dtype:
                self.casts[at] += 1
                self.bytes[at] += tensors[0].nbytes + result.nbytes
        elif tensors and name not in NO_OPS:
            self.ops[at, name, frozenset(x.dtype for x in tensors)] += 1
        return result
