"""A model trained with hmpx, the same on FP32 copies beside it, and what must agree between the two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hmpx
from hmpx.updates.stepping.released import Released
from tests.support.models import BF16, BY_ELEMENT, CLASSES, FP32, Setup, made_optimizer, make
from tests.support.oracle import Entry, Reference
from tests.support.state_codes import widened

Tensor = torch.Tensor


FOREIGN = 777  # the step number of a group from elsewhere, until the next step


class Different(AssertionError):
    """hmpx and the FP32 copies disagree."""


class World:
    """Both sides of one program. Rules act on both; `check` compares them."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.cls = setup, CLASSES[setup.optimizer]
        self.model = make(setup.params)
        names = [name for name, _ in self.model.named_parameters()]
        groups = [group for i in range(setup.groups) if (group := names[i :: setup.groups])]
        self.optimizer = self.new_optimizer(groups)
        self.reference = Reference(setup, self.model, groups)
        self.released: set[str] = set()  # parameters that have stepped in backward, or wait to, since the last step
        self.waiting: dict[Entry, Tensor] = {}  # those that wait, after a backward that failed, and their gradients
        self.averages: dict[str, Tensor] = {}
        self.aside: dict[str, Tensor] = {}  # weights while the averages stand in their place
        self.saved: list[tuple] = []
        self.older: list[tuple] = []  # optimizers of the same parameters before this one, with their settings
        self.schedulers: list | None = None
        self.attached = self.stepped = self.was_in_codes = self.is_new_copy = False
        if setup.attach is not None:
            self.attach()

    def new_optimizer(self, groups: list[list[str]]) -> torch.optim.Optimizer:
        """A new optimizer over parameters of the model, named as the setup says."""
        return made_optimizer(self.setup, [[self.item(name) for name in group] for group in groups])

    def item(self, name: str) -> Any:
        """A parameter as optimizers of this program take it."""
        return (name, self[name]) if self.setup.names == "named_parameters" else self[name]

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    @property
    def settings(self) -> dict[str, Any]:
        return self.reference.settings

    @property
    def entries(self) -> list[Entry]:
        return self.reference.entries

    @property
    def held(self) -> list[Entry]:
        return self.reference.held()

    @property
    def takes_any_gradient(self) -> bool:
        """Whether the layout of a gradient makes no difference to the optimizer's own numbers."""
        return self.cls in BY_ELEMENT

    def attach(self) -> None:
        """Attach as the settings say, with names from where the setup says."""
        held = [entry.name for entry in self.held]
        self.reference.given = set()
        more: dict[str, Any] = {}
        if self.setup.names == "names":
            more["names"], self.reference.given = held, set(held)
        elif self.setup.names == "model":
            more["model"], self.reference.given = self.model, {entry.name for entry in self.entries}
        with torch.device(self.setup.default_device):
            hmpx.attach(self.optimizer, **self.settings, **more)
        self.attached = True
        self.was_in_codes |= self.reference.has_codes
        self.adopted()

    def adopted(self) -> None:
        """Gradients of parameters that an attachment has taken over have the dtype that it says."""
        for entry in self.held:
            if entry.weight is None:
                entry.grad_dtype = FP32
            else:
                wide = self.settings.get("use_fp32_grad_acc")
                entry.grad_dtype = FP32 if wide else BF16
                entry.grad = None if entry.grad is None else entry.grad.to(entry.grad_dtype)

    @contextlib.contextmanager
    def region(self, seed: int | None = None, always: bool = False) -> Iterator[None]:
        """Where a step of this program runs."""
        inside = always or not self.attached
        where = hmpx.disable_casts(seed=seed) if inside else contextlib.nullcontext()
        with torch.device(self.setup.default_device), where:
            yield

    def let_wait(self, entry: Entry, is_last: bool) -> None:
        """The gradient of an entry is complete and released: it steps when enough wait, and at the end of backward."""
        self.waiting[entry], entry.grad = entry.grad, None
        self.released.add(entry.name)
        if is_last or sum(each.q.numel() for each in self.waiting) >= self.setup.waits:
            self.step_waiting()

    def step_waiting(self) -> None:
        for entry, grad in self.waiting.items():
            entry.grad = grad
        if self.waiting:
            self.reference.step(only=[*self.waiting])
        for entry in self.waiting:
            entry.grad = None
        self.waiting.clear()

    def step_copies(self, seed: int | None = None, closure: Callable | None = None) -> Any:
        """`Reference.step`; one in a region without BF16 parameters is no step of hmpx's, and has no number."""
        reference, plain = self.reference, not self.attached and all(entry.weight is None for entry in self.held)
        numbers = reference.count, reference.stored_seed, reference.has_begun
        following = [entry.next for entry in self.entries]
        self.step_waiting()
        self.released.clear()
        loss = reference.step(seed, closure)
        if plain:
            reference.count, reference.stored_seed, reference.has_begun = numbers
            for entry, number in zip(self.entries, following, strict=True):
                entry.next = number
        return loss

    def set_grad(self, entry: Entry, grad: Tensor | None) -> None:
        """On both sides; `grad` in the layout that the parameter's shall have."""
        self[entry.name].grad = grad if grad is None else grad.to(entry.grad_dtype)
        entry.grad = grad if grad is None else grad.detach().to(entry.grad_dtype).clone()

    def check(self) -> None:
        """Raise `Different` if the sides disagree."""
        exact = not self.settings.get("fused")
        agree = same_bits if exact else _close
        for entry in self.entries:
            p = self[entry.name]
            _demand(p.dtype is entry.seen.dtype, f"{entry.name} is {p.dtype}")
            _demand(agree(p.detach(), entry.seen), f"weight {entry.name}", p.detach(), entry.seen)
            is_here = p.grad is not None and type(p.grad) is not Released
            _demand(is_here == (entry.grad is not None), f"gradient {entry.name}", p.grad, entry.grad)
            if entry.grad is not None:
                given, meant = p.grad.detach().to_dense().float(), entry.grad.to_dense().float()
                _demand(same_bits(given, meant), f"gradient {entry.name}", given, meant)
        self._check_groups()
        self._check_state(agree)
        if not exact:
            self._take_over()

    def _check_groups(self) -> None:
        reference = self.reference
        groups, meant = self.optimizer.param_groups, reference.optimizer.param_groups
        _demand(len(groups) == len(meant), "number of groups", len(groups), len(meant))
        names = iter(entry.name for entry in self.held)
        for ours, theirs in zip(groups, meant, strict=True):
            _demand(len(ours["params"]) == len(theirs["params"]), "parameters of a group")
            for p in ours["params"]:
                name = next(names)
                _demand(p is self[name], f"{name} is not the model's own in param_groups")
            for key, value in theirs.items():
                _demand(
                    key in ("params", "param_names") or ours.get(key) == value, f"option {key}", ours.get(key), value
                )
        numbers = [(g.get("hmpx_step"), g.get("hmpx_seed")) for g in self.optimizer.param_groups]
        counts = {step for step, _ in numbers} - {None, None if self.stepped else FOREIGN}
        known = counts or not reference.count or not self.stepped  # a group that was taken out takes them along
        _demand(counts <= {reference.count} and known, "step number", counts, reference.count)
        self.stepped = False

    def _check_state(self, agree: Callable) -> None:
        ours, theirs = self.optimizer.state, self.reference.optimizer.state
        real = {id(self[entry.name]) for entry in self.entries}
        # What was rounded to -0 in a code is 0 when it is rounded once more, and no weight depends on which it is.
        agree_on = (lambda a, b: agree(a + 0.0, b + 0.0)) if self.was_in_codes else agree
        _demand(all(id(p) in real for p in ours), "state of something that is no parameter of the model")
        for entry in self.entries:
            given, meant = widened(ours.get(self[entry.name], {}), entry.q.shape), theirs.get(entry.q, {})
            _demand(set(given) == set(meant), f"state of {entry.name}", set(given), set(meant))
            if meant.get("step") == 0:  # what a constructor made, which the first step brings into its dtype
                continue
            for key, value in meant.items():
                _demand(_agree(given[key], value, agree_on), f"state {entry.name}.{key}", given[key], value)

    def _take_over(self) -> None:
        """What was computed in another order goes on from hmpx's numbers, so that each step is compared by itself."""
        for entry in self.entries:
            self.reference.write(entry, self[entry.name].detach())
            for key, value in self.reference.optimizer.state.get(entry.q, {}).items():
                if isinstance(value, Tensor):
                    value.copy_(widened(self.optimizer.state[self[entry.name]], entry.q.shape)[key])


def _demand(condition: Any, what: str, *sides: Any) -> None:
    if not condition:
        hmpx_has, right = sides or ("", "")
        raise Different(f"{what}{f': {_short(hmpx_has)}, not {_short(right)}' if sides else ''}")


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:300]
    return f"{value.flatten()[:6].tolist()} of {tuple(value.shape)}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """To the bit; NaN is NaN."""
    if a.shape != b.shape:
        return False
    a, b = a.float().contiguous(), b.float().contiguous()
    return torch.equal(a.view(torch.int32), b.view(torch.int32)) or bool(
        ((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all()
    )


def _close(a: Tensor, b: Tensor) -> bool:
    """Up to the order of operations: BF16 may round to the neighbour, in a few places."""
    if a.shape != b.shape or a.dtype not in (BF16, FP32):
        return False
    if not a.numel() or same_bits(a, b):
        return True
    narrow = a.dtype is BF16
    off = a.float() != b.float()
    bound = (2**-7 if narrow else 1e-5) * torch.maximum(
        b.float().abs(), b.float().abs().mean() * (1e-3 if narrow else 1)
    )
    near = ((a.float() - b.float()).abs() <= bound).all()
    return bool(near) and (not narrow or int(off.sum()) <= max(2, a.numel() // 20))


def _agree(given: Any, meant: Any, agree: Callable) -> bool:
    if isinstance(meant, list):
        return (
            isinstance(given, list)
            and len(given) == len(meant)
            and all(map(_agree, given, meant, [agree] * len(meant)))
        )
    if isinstance(meant, Tensor):
        return isinstance(given, Tensor) and agree(given.detach(), meant.detach())
    return given == meant or (given != given and meant != meant)  # NaN is NaN
