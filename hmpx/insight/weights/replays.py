"""Steps each way to hold weights and state beside the FP32 run, on the same gradients.

A copy of the parameters, with an optimizer of its own that is attached in one way, takes the gradient that the FP32 run
takes, at every step. How far its weights come from those of the FP32 run is what that way does by itself: nothing
answers to it, so the error of a parameter is its own. For the weights, state is FP32, and the error is that of the BF16
weights, which the forward pass would see; for the state, masters are kept, and the error is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.course import by_name
from hmpx.insight.weights.ladder import STATES, WEIGHTS
from hmpx.updates.attach import attach
from hmpx.updates.holding.settings import Weights
from hmpx.updates.holding.state_forms import StateDtype

Alternative = str | torch.dtype  # of `WEIGHTS` or of `STATES`
_STEPPED: dict[Alternative, tuple[Weights, StateDtype]] = {
    "stochastic": ("stochastic", torch.float32),
    "split8": ("split8", torch.float32),
    "8bit": ("master", "8bit"),
    torch.bfloat16: ("master", torch.bfloat16),
}
EXACT = {WEIGHTS[-1], torch.float32}  # these have no error


class Replay:
    """One way, beside the FP32 run.

    names: of the parameters that are held so.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], which: Alternative
    ) -> None:
        weights, state_dtype = _STEPPED[which]
        self._model, self._optimizer, self._of_state = model, optimizer, which in STATES
        own = by_name(model)
        self._own = {name: own[name] for name in names}
        start = {p: p.detach().clone() for p in self._own.values()}
        for p in self._own.values():
            p.grad = None
            p.data = p.data.bfloat16()
        wide = hasattr(torch.Tensor, "grad_dtype")
        self.handle = attach(optimizer, weights, model=model, state_dtype=state_dtype, use_fp32_grad_acc=wide)
        self.handle.set_masters(start)
        self.updates = self.handle.updates() if which == "stochastic" else None
        self._grad_dtype = torch.float32 if wide else torch.bfloat16

    def step(self, exact: torch.nn.Module) -> None:
        """Take the gradients of the FP32 run and step."""
        for (name, p), q in zip(by_name(self._model).items(), exact.parameters(), strict=True):
            dtype = self._grad_dtype if name in self._own else q.dtype
            p.grad = None if q.grad is None else q.grad.detach().to(dtype, copy=True)
        self._optimizer.step()

    @torch.no_grad()
    def errors(self, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """How far the weights, or the masters, are from those of the FP32 run."""
        found = {}
        for name, p in self._own.items():
            held = p.float()
            if self._of_state:
                masters = self.handle.masters_of(p)
                held = held if masters is None else masters
            found[name] = held - exact[name]
        return found


def rounded(exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The error of weights that are the rounding of exact masters."""
    return {name: w.bfloat16().float() - w for name, w in exact.items()}
