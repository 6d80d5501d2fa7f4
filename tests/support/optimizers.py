"""Optimizers that hmpx does not know, of the kinds that people write."""

from torch import optim


class UnlistedSGD(optim.SGD):
    """A class that hmpx does not know: it steps on a whole FP32 copy."""


class UnlistedAdamW(optim.AdamW):
    """A class that hmpx does not know, with two moments."""


class Around(optim.Optimizer):
    """An optimizer around another one, which steps, and whose groups it has."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)
