"""What can be said about how the weights, the state and the gradients of one optimizer are held and updated.

A setting is a field here, which has its default, an argument of `hmpx.attach`, which documents it, and a key of a
recipe. A test holds the three names against one another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from hmpx.dtype_names import dtype_named
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.state_forms import STATE_FORMS, StateDtype
from hmpx.updates.weights import WAYS

Weights = Literal["stochastic", "nearest", "master", "split", "split8"]


@dataclass(frozen=True)
class Settings:
    """The arguments of `hmpx.attach` that say how an optimizer updates weights; see there.

    The defaults are what a `disable_casts()` region does. A dtype may be given by its name (``"bf16"``).

    Raises:
        HmpxError: a value that is not legal, or masters in a checkpoint without a store that has them.
    """

    weights: Weights = "stochastic"
    seed: int | None = None
    state_dtype: StateDtype = torch.float32
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str) or self.weights not in WAYS:
            legal = ", ".join(repr(way) for way in WAYS)
            if isinstance(self.weights, torch.nn.Module):
                raise HmpxError(f"weights is a {type(self.weights).__name__}, not one of {legal}; did you mean model=?")
            raise HmpxError(f"weights={self.weights!r} is none of {legal}{did_you_mean(str(self.weights), WAYS)}")
        if self.seed is not None:
            check_seed(self.seed)
        object.__setattr__(self, "state_dtype", dtype_named(self.state_dtype))
        if not any(type(self.state_dtype) is type(each) and self.state_dtype == each for each in STATE_FORMS):
            legal, words = ", ".join(map(repr, STATE_FORMS)), [each for each in STATE_FORMS if isinstance(each, str)]
            hint = did_you_mean(str(self.state_dtype), words)
            raise HmpxError(f"state_dtype={self.state_dtype!r} is none of {legal}{hint}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise HmpxError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if self.use_master_weights_in_ckpt and not self.has_masters:
            raise HmpxError(
                f"weights={self.weights!r} has no masters; use_master_weights_in_ckpt needs master, split or split8"
            )

    @property
    def has_masters(self) -> bool:
        """Whether the store holds FP32 masters."""
        return WAYS[self.weights].has_masters


SWITCHES = tuple(each.name for each in fields(Settings) if each.type == "bool")
