"""What hmpx must come to: the plain torch optimizer on FP32 copies, rounded after each step.

Written from the rules, not from the code: whole tensors, no slices, no shadows, no hooks. Of hmpx only
`stochastic_round` is used, which has tests of its own.

- The optimizer is torch's own, on FP32 parameters, with FP32 gradients and state.
- stochastic, nearest: after the step the FP32 numbers are rounded, and the next step starts from what was rounded.
- master, split: the FP32 numbers stay. The weight is what they round to, ties to even (master) or away from zero
  (split, and split8, whose numbers are first rounded to 24 bits). An element of the weight that its master rounds to
  in neither way was written by hand, and counts; in halves, with the rest that its master had.
- `state_dtype=torch.bfloat16`: every state tensor with a dimension is rounded after the step as "parameter.key";
  `"8bit"`, `"fp8"`, `"4bit"`: every one that has the parameter's shape, to numbers that `state_codes.py` lists, and
  before the step as "parameter.key.moved" what was held in another form. Of Muon, and of parameters of one dimension
  or one element, BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hmpx
from tests.support.models import BF16, BY_PARTS, FP32, Setup, made_optimizer
from tests.support.numbers import drawn
from tests.support.state_codes import PREFIXES, held_as, in_code

Tensor = torch.Tensor
SCALARS = ("step", "mu_product", "eta", "mu", "H_diag", "t")  # of torch's optimizers: these are no moments
MASTERS = ("master", "split", "split8")
WEIGHTS = ("before",)  # of `SharpnessAware`: held in FP32, whatever moments are held in


def away_from_zero(x: Tensor) -> Tensor:
    """FP32 to BF16, to nearest, ties away from zero; worked out in FP64 from the numbers, not from their bits."""
    wide = x.double()
    exponent = torch.frexp(wide.abs())[1].clamp(min=-125)
    unit = torch.ldexp(torch.ones_like(wide), exponent - 8)
    rounded = torch.copysign(torch.floor(wide.abs() / unit + 0.5) * unit, wide)
    return torch.where(torch.isfinite(wide), rounded, wide).to(BF16)


def to_24_bits(x: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """FP32 to numbers with 16 significant bits, stochastically; worked out in FP64 from the numbers, not from bits."""
    wide = x.double()
    exponent = torch.frexp(wide.abs())[1].clamp(min=-125)
    unit = torch.ldexp(torch.ones_like(wide), exponent - 16)
    whole = torch.floor(wide.abs() / unit)
    r = torch.from_numpy(drawn(x.numel(), seed, step, name) // 256).view(x.shape)
    up = torch.floor((wide.abs() / unit - whole) * 256) + r >= 256
    rounded = torch.copysign((whole + up) * unit, wide)
    largest = (2 - 2.0**-15) * 2.0**127
    rounded = torch.where(wide.abs() > largest, torch.copysign(torch.full_like(wide, largest), wide), rounded)
    return torch.where(torch.isfinite(wide), rounded, wide).float()


class Stopped(Exception):
    """What a program raises in the middle of a step."""


class TorchRefuses(Exception):
    """The plain optimizer cannot take this step, so there is nothing to compare with."""


@dataclass(eq=False)
class Entry:
    """One parameter: `q` is what the plain optimizer holds; `weight` is None where the model holds FP32."""

    name: str
    q: nn.Parameter
    weight: Tensor | None
    master: Tensor | None = None
    loaded: bool = False  # the master, from a checkpoint of either way to hold it
    grad: Tensor | None = None
    grad_dtype: torch.dtype = FP32
    next: int = 0  # the number of its next step, for an optimizer that begins
    coded: dict[str, tuple[str, Tensor]] = field(default_factory=dict)  # the code of each state tensor, and its numbers
    # for the length of a step:
    before: Tensor | None = None
    shown: tuple[Tensor, int] | None = None
    stepped: bool = False

    @property
    def seen(self) -> Tensor:
        """What the model's parameter holds."""
        return self.q.detach() if self.weight is None else self.weight


class Reference:
    """The program on FP32 copies."""

    def __init__(self, setup: Setup, model: nn.Module, groups: list[list[str]]) -> None:
        self.setup, self.settings = setup, dict(setup.attach or {})
        self.count, self.stored_seed, self.has_begun = 0, None, False
        self.given: set[str] = set()  # names that `attach` was given; the others are positions
        self.entries: list[Entry] = []
        for name, p in model.named_parameters():
            self.add(name, p)
        by_name = {entry.name: entry for entry in self.entries}
        self.optimizer = made_optimizer(setup, [[by_name[name].q for name in group] for group in groups])

    def add(self, name: str, p: Tensor) -> Entry:
        """A copy of a parameter; torch's fused kernels walk memory, and get everything in one order."""
        q = p.detach().to(FP32, copy=True)
        q = q.contiguous() if self.setup.options.get("fused") else q
        entry = Entry(name, nn.Parameter(q), p.detach().clone() if p.dtype is BF16 else None)
        entry.grad_dtype = p.dtype
        self.entries.append(entry)
        return entry

    def held(self) -> list[Entry]:
        """Those in the optimizer, in its order."""
        of = {id(entry.q): entry for entry in self.entries}
        return [of[id(q)] for group in self.optimizer.param_groups for q in group["params"]]

    @property
    def way(self) -> str:
        return self.settings.get("weights", "stochastic")

    def state_dtype(self, entry: Entry) -> Any:
        given = self.settings.get("state_dtype")
        if given not in PREFIXES:
            return given
        return BF16 if self.setup.optimizer == "Muon" else held_as(given, entry.q.shape) or BF16

    @property
    def has_codes(self) -> bool:
        return any(self.state_dtype(entry) in PREFIXES for entry in self.entries)

    def names(self) -> dict[Entry, str]:
        """What the random numbers of each parameter are keyed by."""
        named = {entry.name for entry in self.entries} if self.setup.names == "named_parameters" else self.given
        return {entry: entry.name if entry.name in named else str(i) for i, entry in enumerate(self.held())}

    def read(self, entry: Entry) -> Tensor:
        """The FP32 number of each element that the next step works on."""
        if entry.weight is None:
            return entry.q.detach()
        if entry.master is None or self.way not in MASTERS:
            return entry.weight.float()
        if self.way == "master" or entry.loaded:  # split knows which way its own ties went
            kept = (away_from_zero(entry.master) == entry.weight) | (entry.master.bfloat16() == entry.weight)
            return torch.where(kept, entry.master, entry.weight.float())
        upper, now = (x.float().view(torch.int32) for x in (away_from_zero(entry.master), entry.weight))
        rest = torch.where(entry.master.isnan(), 0, entry.master.view(torch.int32) - upper)
        rest = torch.where(entry.weight == 0, rest.clamp(min=0), rest)
        return (now + torch.where(entry.weight.isinf(), rest.clamp(max=0), rest)).view(FP32)

    def seed(self, of_region: int | None = None) -> int:
        given = (of_region, self.settings.get("seed"), self.stored_seed, 0)
        return next(seed for seed in given if seed is not None)

    def number(self, of_region: int | None = None) -> int:
        """The number of the next step: a new optimizer goes on from the last one of its parameters."""
        if self.has_begun or of_region is not None or self.settings.get("seed") is not None:
            return self.count
        return max([entry.next for entry in self.held()], default=0)

    def step(self, of_region: int | None = None, closure: Callable | None = None, only: list | None = None) -> Any:
        """One step; `closure` sets gradients of entries from the weights that it is shown, and returns the loss.

        `only`: a part of a step, for the entries in it.
        """
        numbers, calls = {"seed": self.seed(of_region), "step": self.number(of_region)}, 0
        entries = self.held()
        self.notice_casts()
        for entry, name in self.names().items():
            self.adopt(entry, name, numbers)
            self._show(entry, only is None or entry in only)

        def evaluate() -> Any:
            nonlocal calls
            calls += 1
            for entry in entries:  # gradients as the step has left them so far
                self._take_grad(entry)
            points = {}
            for entry in entries:
                moved = calls > 1 and entry.weight is not None and not torch.equal(entry.q.detach(), entry.before)
                points[entry] = entry.q.detach().bfloat16() if moved else entry.seen
            loss = closure(points)
            for entry in entries:
                self._show_grad(entry)
            return loss

        try:
            loss = self.optimizer.step(*([] if closure is None else [evaluate]))
        except (RuntimeError, TypeError, ValueError) as error:
            raise TorchRefuses from error
        names = self.names()
        for entry in entries:
            if only is None:
                self._take_grad(entry)
            self._round(entry, names[entry], numbers)
        if only is None:
            self.count, self.stored_seed, self.has_begun = numbers["step"] + 1, numbers["seed"], True
            for entry in entries:
                entry.next = self.count
        return loss

    def overflow(self) -> None:
        """A step of a fused optimizer that a GradScaler has told to change nothing: it makes empty state."""
        for entry, name in self.names().items():
            self.adopt(entry, name, {"seed": self.seed(), "step": self.number()})
            self._show(entry, True)
        self.optimizer.found_inf, self.optimizer.grad_scale = torch.ones(()), None
        self.optimizer.step()
        del self.optimizer.found_inf, self.optimizer.grad_scale

    @torch.no_grad()
    def adopt(self, entry: Entry, name: str, numbers: dict) -> None:
        """Bring state that is held in another form, of a parameter that was FP32, into the one of the settings."""
        state = self.optimizer.state.get(entry.q, {})
        narrow = entry.weight is not None and self.state_dtype(entry) is BF16
        if self._is_filled(state):
            state["sum"].fill_(self._fill(BF16 if narrow and entry.q.numel() != 1 else FP32))  # one element is FP32
        elif narrow:
            state.update({key: v if isinstance(v, list) else _narrowed(v) for key, v in state.items()})
        if entry.weight is not None:
            self._to_codes(entry, name + ".{}.moved", numbers)
        else:
            entry.coded = {}

    def adopt_early(self, entry: Entry, name: str, shown: dict[str, Any]) -> None:
        """A step that failed may have done this to a part of the state; the next one would do just the same."""
        state = self.optimizer.state.get(entry.q, {})
        before = copy.deepcopy(dict(state))
        self.adopt(entry, name, {"seed": self.seed(), "step": self.number()})
        for key, value in before.items():
            if isinstance(value, Tensor) and not (key in shown and torch.equal(state[key], shown[key].float())):
                state[key] = value

    def _show(self, entry: Entry, with_grad: bool) -> None:
        with torch.no_grad():
            entry.before = self.read(entry).clone()
            entry.q.copy_(entry.before)
        entry.stepped = False
        self._show_grad(entry) if with_grad else setattr(entry.q, "grad", None)

    def _fill(self, dtype: torch.dtype = FP32) -> Tensor:
        """What Adagrad's constructor fills its state with, in an FP32 tensor."""
        return torch.tensor(self.setup.options.get("initial_accumulator_value", 0.0)).to(dtype).float()

    def _is_filled(self, state: dict) -> bool:
        """Whether a state is what Adagrad's constructor has made. The first step in 8 bits rounds it, for good."""
        if state.get("step") != 0 or "sum" not in state:
            return False
        return bool(torch.isin(state["sum"], torch.stack([self._fill(), self._fill(BF16)])).all())

    def _show_grad(self, entry: Entry) -> None:
        if entry.grad is None:
            entry.q.grad = None
        elif entry.grad.is_sparse:
            entry.q.grad = entry.grad.float()
        else:
            entry.q.grad = torch.empty_like(entry.q).copy_(entry.grad)
        entry.shown = None if entry.grad is None else (entry.q.grad, entry.q.grad._version)
        entry.stepped = entry.stepped or entry.grad is not None

    def _take_grad(self, entry: Entry) -> None:
        """What a step does to a gradient is done to the parameter's."""
        if entry.q.grad is None:
            entry.grad = None
        elif entry.shown is None or entry.shown[0] is not entry.q.grad or entry.shown[1] != entry.q.grad._version:
            entry.grad = entry.q.grad.detach().to(entry.grad_dtype)

    def _round(self, entry: Entry, name: str, numbers: dict) -> None:
        if entry.weight is None:
            return
        self._round_state(entry, name, numbers)
        x = entry.q.detach()
        # A tie in a master from a checkpoint, which may have been rounded to even, is rounded again by a step of all.
        at_once = entry.loaded and type(self.optimizer) not in BY_PARTS
        if not entry.stepped and torch.equal(x, entry.before) and not at_once:
            return
        if self.way == "stochastic":
            entry.weight = hmpx.stochastic_round(x, **numbers, name=name)
        elif self.way == "split":
            entry.weight, entry.master, entry.loaded = away_from_zero(x), x.clone(), False
        elif self.way == "split8":
            entry.master, entry.loaded = to_24_bits(x, **numbers, name=name), False
            entry.weight = away_from_zero(entry.master)
        else:
            entry.weight, entry.master = x.bfloat16(), x.clone()

    def _round_state(self, entry: Entry, name: str, numbers: dict) -> None:
        if self.state_dtype(entry) is BF16:
            for key, value in self.optimizer.state.get(entry.q, {}).items():
                is_moment = isinstance(value, Tensor) and value.dtype is FP32 and value.numel() != 1
                if is_moment and key not in WEIGHTS:
                    value.copy_(hmpx.stochastic_round(value, **numbers, name=f"{name}.{key}"))
        self._to_codes(entry, name + ".{}", numbers)

    def _to_codes(self, entry: Entry, name: str, numbers: dict) -> None:
        """What stands in this code already stays; in 4 bits, rounding it once more could change it."""
        code = self.state_dtype(entry)
        entry.coded = {key: each for key, each in entry.coded.items() if each[0] == code}
        for key, value in self.optimizer.state.get(entry.q, {}).items() if code in PREFIXES else ():
            is_held = isinstance(value, Tensor) and value.dtype is FP32 and value.numel() != 1
            is_held = is_held and value.shape == entry.q.shape and key not in WEIGHTS
            if is_held and not (key in entry.coded and torch.equal(value, entry.coded[key][1])):
                value.copy_(in_code(value, code, **numbers, name=name.format(key))[0])
                entry.coded[key] = code, value.clone()

    def succeed(self, settings: dict[str, Any]) -> None:
        """A new optimizer, attached with these settings, over the parameters of the old one."""
        self.optimizer = made_optimizer(self.setup, [group["params"] for group in self.optimizer.param_groups])
        self.settings = settings
        self.count, self.stored_seed, self.has_begun = 0, None, False
        for entry in self.entries:
            entry.master, entry.coded = None, {}

    def detach(self) -> None:
        """State goes to the parameter's dtype, masters are dropped, and so are seed and step number."""
        for entry in self.held():
            state = self.optimizer.state.get(entry.q, {})
            if entry.weight is not None and state.get("step") == 0 and "sum" in state:
                state["sum"].fill_(self._fill())
            elif entry.weight is not None:
                state.update({key: _narrowed(value) for key, value in state.items()})
                if entry.q.numel() == 1 and type(self.optimizer).__module__.startswith("torch.optim"):
                    state.update({key: _as_bf16(value) for key, value in state.items() if key not in SCALARS})
        for entry in self.entries:
            entry.master, entry.coded = None, {}
        self.count, self.stored_seed, self.has_begun = 0, None, False

    def save(self) -> dict[str, Any]:
        """What checkpoints of model and optimizer hold."""
        return {
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "weights": {entry.name: entry.seen.clone() for entry in self.entries},
            "masters": [None if entry.weight is None else self.read(entry).clone() for entry in self.held()],
            "coded": [dict(entry.coded) for entry in self.held()],
            "numbers": (self.count, self.stored_seed),
            "has_begun": self.has_begun,
        }

    @torch.no_grad()
    def load(self, saved: dict[str, Any], weights: bool, is_open: bool) -> None:
        """`weights`: the model's as well. is_open: some parameters had taken the next step.

        A checkpoint without masters of the step that is here, which wrappers load after they have asked for it, leaves
        the masters that are here.
        """
        own = not is_open and saved["numbers"] == (self.count, self.stored_seed)
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.count, self.stored_seed = saved["numbers"]
        self.has_begun = saved["has_begun"]
        for entry in self.held():
            entry.next = self.count
        for entry, coded in zip(self.held(), saved["coded"], strict=True):
            entry.coded = dict(coded)
        if weights:
            for entry in self.entries:
                self.write(entry, saved["weights"][entry.name])
        for entry in self.entries:
            entry.master = entry.master if own else None
        if self.settings.get("use_master_weights_in_ckpt"):
            for entry, master in zip(self.held(), saved["masters"], strict=True):
                if entry.weight is not None:
                    entry.master, entry.loaded = None if master is None else master.clone(), True

    def lay(self, entry: Entry, p: Tensor) -> None:
        """The parameter lies in another layout, in which an optimizer takes sums in another order."""
        if not self.setup.options.get("fused"):
            entry.q.data = torch.empty_like(p, dtype=FP32).copy_(entry.q.detach())

    @torch.no_grad()
    def cast(self, entry: Entry, dtype: torch.dtype) -> None:
        """The model's parameter changes its dtype, and goes on from what was seen."""
        x = entry.seen.float()
        entry.q.copy_(x)
        entry.weight = x.to(BF16) if dtype is BF16 else None
        entry.grad_dtype = dtype
        if entry.grad is not None:
            entry.grad = entry.grad.to(dtype)

    def notice_casts(self) -> None:
        """An optimizer looks at its parameters: what is FP32 now starts without a master when it is BF16 again.

        One that was FP32 in between, for an evaluation, has its master still: no value was changed.
        """
        for entry in self.held():
            entry.master = None if entry.weight is None else entry.master

    @torch.no_grad()
    def write(self, entry: Entry, x: Tensor) -> None:
        """Somebody writes to the weight."""
        if entry.weight is None:
            entry.q.copy_(x)
        else:
            entry.weight = x.to(BF16).clone()


def _as_bf16(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) and value.dtype is FP32 else value


def _narrowed(value: Any) -> Any:
    if isinstance(value, list):
        return [_narrowed(item) for item in value]
    if isinstance(value, Tensor) and value.dtype is FP32 and value.numel() != 1:
        return value.bfloat16().float()
    return value
