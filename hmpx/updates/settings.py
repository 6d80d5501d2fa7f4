"""How the weights, the state and the gradients of one optimizer are kept and updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hmpx.dtype_names import dtype_named
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.weights import WAYS


@dataclass(frozen=True)
class Settings:
    """What `hmpx.attach` was asked for; the defaults are what a `disable_casts()` region does.

    Attributes:
        weights: "stochastic", "nearest", "master" or "split".
        seed: of the rounding numbers; None: the one in the optimizer's `state_dict`, else 0.
        state_dtype: torch.float32 or torch.bfloat16, how the optimizer's state is held between steps. `attach` takes a
            name (``"bf16"``) too.
        use_fp32_grad_acc: gradients of BF16 parameters accumulate in FP32.
        use_master_weights_in_ckpt: `state_dict()` holds FP32 masters.
        release_gradients: each parameter steps, and frees its gradient, as soon as its gradient is complete.
        fused: Adam, AdamW and SGD run in one kernel of hmpx's own, rounding included.
    """

    weights: str = "stochastic"
    seed: int | None = None
    state_dtype: torch.dtype = torch.float32
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
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise HmpxError(f"state_dtype={self.state_dtype!r} is neither torch.float32 nor torch.bfloat16")
        for name in ("use_fp32_grad_acc", "use_master_weights_in_ckpt", "release_gradients", "fused"):
            if not isinstance(getattr(self, name), bool):
                raise HmpxError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if self.use_master_weights_in_ckpt and not self.has_masters:
            raise HmpxError(
                f"weights={self.weights!r} has no masters; use_master_weights_in_ckpt needs master or split"
            )

    @property
    def has_masters(self) -> bool:
        return WAYS[self.weights].has_masters
