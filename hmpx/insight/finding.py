"""`Finding`: one thing that a look has found, to be printed, saved, or answered by a recipe.

What is to be done is said in the words of the script's own loop, or of the trainer that owns it.

`Place` is where an op was called and why it has its rule: the line, modules and tensors by name, read from the frames
of the call.
"""

from __future__ import annotations

import os
import re
import shlex
import site
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch

from hmpx.base import process_state, region_state
from hmpx.base.raw import variables
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import base_of
from hmpx.insight.report import Lines
from hmpx.insight.tensors import LOW, Tensor
from hmpx.ops.forwards import overlay_that_casts
from hmpx.ops.policies.catalog import Op, catalog
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.callers import frames, modules, users_frame
from hmpx.ops.wrapping.observing import EntryPoint, Seen
from hmpx.ops.wrapping.rules import is_explicit

_INDENT = " " * 7  # as long as "WRONG  "
Names = Mapping[torch.nn.Parameter, str]


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: what it is, in a word or two: "lost updates", "loss", "mask".
        wrong: whether it harms the training; otherwise it is a note, which is worth knowing.
        said: what was found, with the number that shows it.
        do: the one thing to do about it.
        where: the line of your code, as file:line; "" if there is none.
        names: the parameters, buffers or modules concerned, the worst first. ops: names in op lists.
        weight: from 0 to 1, how much of the training it touches; findings are sorted by it.
        recipe: the keys of a recipe that answer it; empty if no recipe does.
        edit: the lines that no recipe mends.
        evidence: figures behind what is said, one sentence each.

    It prints as a sentence; `as_json()` is a dict of its attributes.
    """

    kind: str
    wrong: bool
    said: str
    do: str
    where: str = ""
    names: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    weight: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    edit: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{short_places(self.where)}: " if self.where else ""
        return f"{'WRONG' if self.wrong else 'note'}  {self.kind}: {place}{self.said}"

    @property
    def to_do(self) -> str:
        """What to do, and whether a recipe does it as well."""
        left = f", which leaves {', '.join(map(short_places, self.edit))}" if self.edit else ""
        how = "--fix recipe.yaml" if process_state.script else 'found.fix("recipe.yaml")'
        return f"{self.do}, or {how}{left}" if self.recipe else self.do

    @property
    def answer(self) -> tuple[str, bool]:
        return self.to_do, self.wrong

    def lines(self, width: int, repeats: bool = False) -> list[str]:
        """Return it as lines of a terminal. repeats: leave out what to do, which the one before it says."""
        lines = textwrap.wrap(str(self), width, subsequent_indent=_INDENT)
        for figure in self.evidence:
            lines += textwrap.wrap(figure, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        do = textwrap.wrap(f"do: {self.to_do}", width, initial_indent=_INDENT, subsequent_indent=f"{_INDENT}    ")
        return lines if repeats else lines + do

    def section(self) -> Lines:
        """Return it as a section of a page."""
        head = f"{'WRONG' if self.wrong else 'note'}: {self.kind}"
        return Lines(head, [self.where, self.said, *self.evidence, f"Do: {self.do}"], self.wrong, names=self.names)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def asked(option: str, call: str) -> str:
    """Return the command line that runs this script again with an option of doctor; in a region of a script, `call`."""
    return f"python -m hmpx doctor {option} {shlex.join(process_state.script)}" if process_state.script else call


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for a kind and a line; of several, the one that weighs most, with the names of all."""
    found: dict[tuple[str, str], Finding] = {}
    for each in findings:
        key = (each.kind, each.where or each.said)
        before = found.get(key, each)
        most = max(before, each, key=lambda one: (one.wrong, one.weight))
        found[key] = replace(most, names=tuple(dict.fromkeys((*most.names, *before.names, *each.names))))
    return [*found.values()]


def percent(share: float) -> str:
    """Return a share as "93.1 %"; as "100 %" or "0 %" only if it is all or nothing."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %"


def first_names(names: tuple[str, ...], most: int = 3) -> str:
    """Return the first few of some names, and how many others there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


# Trainers that own the loop and the optimizer, and what their users write in place of what acts on these

_LIGHTNING = {
    "hmpx.attach": "Trainer(plugins=hmpx.integrations.lightning.HmpxPrecision({}))",
    "torch.autocast": 'Trainer(precision="bf16-mixed")',
    "GradScaler": 'Trainer(precision="16-mixed")',
}
_TRANSFORMERS = {
    "hmpx.attach": "Trainer(callbacks=[hmpx.integrations.transformers.HmpxCallback({})])",
    "torch.autocast": "TrainingArguments(bf16=True)",
    "GradScaler": "TrainingArguments(fp16=True)",
}
_TRAINERS = {
    ("transformers.trainer", "Trainer"): _TRANSFORMERS,
    ("lightning.pytorch.trainer.trainer", "Trainer"): _LIGHTNING,
    ("pytorch_lightning.trainer.trainer", "Trainer"): _LIGHTNING,
}
_ATTACH = re.compile(r"hmpx\.attach\(optimizer(, [^()]*)?\)")


def words_of_trainer(frame: FrameType) -> dict[str, str]:
    """Return what a user writes if a trainer runs this frame; empty if none that is known does."""
    known = [(getattr(sys.modules.get(where), name, None), words) for (where, name), words in _TRAINERS.items()]
    for each in frames(frame):
        own = variables(each).get("self")
        for kind, words in known:
            if kind is not None and isinstance(own, kind):
                return words
    return {}


def in_words(do: str, words: dict[str, str]) -> str:
    """Return what is to be done in the words of a trainer; in those of the script's own loop, if it has none."""
    if not words:
        return do
    recipe = (
        '"bf16-sr"{}'.format((keys[1] or "").replace("torch.bfloat16", '"bfloat16"')) for keys in _ATTACH.finditer(do)
    )
    do = _ATTACH.sub(lambda _: words["hmpx.attach"].format(next(recipe)), do)
    do = do.replace("as torch.autocast does", f"as {words['torch.autocast']} does")
    return re.sub(r'torch\.amp\.GradScaler\("\w+"\)', words["GradScaler"], do)


_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|\Z| )")  # of a layer, in the name of a module
MIXING = frozenset("add sub mul div where addcmul addcdiv lerp maximum minimum".split())  # ops that take two dtypes
# The folders of packages: of this interpreter, of its user, and the one that torch is in.
PACKAGES = tuple(
    os.path.join(folder, "")
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(torch.__file__)),
    )
)
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")  # hmpx, however it is installed
_LIBRARIES = (*PACKAGES, _OWN, os.path.dirname(os.__file__) + os.sep, "<frozen")
_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front


def numberless(text: str) -> str:
    """Return the name of a module with a star for each number, so that equal blocks have one name."""
    return _INDEX.sub("*", text)


class ModuleNames:
    """The name of each module within the outermost module that was running when it was first seen."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, str]] = {}

    def of_module(self, module: torch.nn.Module | None, frame: types.FrameType) -> str:
        """Return the dotted name of a module that runs in `frame`; the name of its class where it is the outermost."""
        if module is None:
            return ""
        known = self._known.get(id(module))
        if known is None or known[0]() is not module:
            *_, root = modules(frame)  # the outermost
            self.add(root)
        return self.known(module)

    def known(self, module: torch.nn.Module | None) -> str:
        """Return the name that is known by now."""
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else type(module).__name__

    def add(self, root: torch.nn.Module) -> None:
        """Name the modules of a model by their names in it."""
        for name, each in root.named_modules():
            for wrapper in _WRAPPERS:
                name = f"{name}.".replace(wrapper, "", 1).rstrip(".") if name else name
            self._known[id(each)] = weakref.ref(each), name or type(each).__name__

    def of_tensor(self, tensor: torch.Tensor, frame: types.FrameType) -> str:
        """Return the name of a parameter or buffer; "" for any other tensor."""
        seen: set[int] = set()
        for owner in modules(frame):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for kind, owned in (("parameter", owner.named_parameters()), ("buffer", owner.named_buffers())):
                for name, each in owned:
                    if each is tensor or each is base_of(tensor):
                        prefix = self.of_module(owner, frame)
                        whole = prefix == type(owner).__name__
                        return f"{kind} {name if whole else f'{prefix}.{name}'}"
        return ""


class Place(NamedTuple):
    """Where an op was called.

    Attributes:
        where: the line, as file:line. script: the same, or the line of the script that called a library's line.
        module: the name of the module that ran. is_inside: whether that is not the outermost one.
    """

    where: str
    script: str
    module: str
    is_inside: bool

    @property
    def within(self) -> str:
        """The library's line, behind a comma; "" if it is the script's."""
        return "" if self.where == self.script else f", in {short_place(self.where)}"


class CallPlaces:
    """The places of calls; each line of each module is looked up once.

    names: of modules and parameters.
    """

    def __init__(self) -> None:
        self.names = ModuleNames()
        self._known: dict[tuple[int, int, int], tuple[Place, types.CodeType | None, Callable[[], Any]]] = {}

    def of(self, frame: types.FrameType) -> Place:
        """Return the place that runs in a frame."""
        user, module = users_frame(frame), next(modules(frame), None)
        code, line = (user.f_code, user.f_lineno) if user is not None else (None, 0)
        known = self._known.get((id(code), line, id(module)))
        if known is None or known[2]() is not module:  # or another one lies where it was
            script = next((each for each in frames(user) if not _is_of_library(each.f_code.co_filename)), user)
            where, editable = (f"{each.f_code.co_filename}:{each.f_lineno}" if each else "" for each in (user, script))
            name = self.names.of_module(module, frame)
            place = Place(where, editable, name, name not in ("", type(module).__name__))
            known = place, code, weakref.ref(module) if module is not None else lambda: None
            self._known[id(code), line, id(module)] = known
        return known[0]

    def learn(self, model: torch.nn.Module) -> dict[Place, Place]:
        """Name the modules of a model by their names in it; return what places were before and what they are now."""
        self.names.add(model)
        renamed = dict[Place, Place]()
        for key, (place, code, held) in self._known.items():
            if (module := held()) is not None:
                name = self.names.known(module)
                now = place._replace(module=name, is_inside=name != type(module).__name__)
                renamed[place] = now
                self._known[key] = now, code, held
        return renamed


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{each}-packages{os.sep}" in file for each in ("site", "dist"))


def unchosen(names: ModuleNames, frame: types.FrameType, given: list[Tensor], result: list[Tensor]) -> str:
    """Say which small FP32 tensor made FP32 of a low-precision stream although no list asks for it; "" if none did.

    It is a parameter, a buffer, or a tensor smaller than the stream. Two streams of one size make no finding: a sum in
    FP32 of an FP32 residual and a BF16 branch is as mixed precision should be.
    """
    wide = [tensor for tensor in given if tensor.dtype is torch.float32 and tensor.dim()]
    low = [tensor for tensor in given if tensor.dtype in LOW]
    if not wide or not low or not result or result[0].dtype is not torch.float32:
        return ""
    most = max([tensor.numel() for tensor in low])
    named = [names.of_tensor(tensor, frame) for tensor in wide]
    if any(not each and tensor.numel() >= most for each, tensor in zip(named, wide, strict=True)):
        return ""
    shapes = ["x".join(map(str, tensor.shape)) for tensor in wide]
    said = [each or f"a tensor of {shape}" for each, shape in zip(named, shapes, strict=True)]
    return f"float32 comes out, as {' and '.join(said)} in float32 met {dtype_name(low[0].dtype)}"


def at_place(where: str, op: str, module: str) -> str:
    """Return line, op and module of a call as one text."""
    inside = f"{op} in {module}" if module else op
    return f"{where}: {inside}" if where else inside


def short_place(where: str) -> str:
    """Shorten file:line to the path from the folder of the program or of its packages, or else to the file's name."""
    path, _, line = where.rpartition(":")
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    inside = next((path.removeprefix(folder) for folder in PACKAGES if path.startswith(folder)), inside)
    return f"{inside}:{line}" if path else where


def short_places(text: str) -> str:
    """Shorten each path in a sentence as `short_place` does."""
    text = text.replace(os.path.join(os.getcwd(), ""), "")  # which may have a space in it
    return re.sub(r"(?<![\w.])/[^\s:]+:\d+", lambda found: short_place(found[0]), text)


# Why an op has its rule, in the words that every view uses


def reason(op: Op, policy: Policy) -> str:
    """Return the rule that an op gets under a policy, and where that comes from."""
    if op.view:
        return f"none: only makes a view: never cast{_where(op.name, policy, ', though ')}"
    if policy.listed_as(op) is None and (composed := _reason_of_parts(op, policy)):
        return composed
    listed = policy.listed_as(op)
    where = _where(op.name, policy) or (f"as {op.follows}, {_where(op.follows, policy)}" if op.follows else "")
    if listed is Rule.PROMOTE and not op.refuses_mixed:
        return f"promote: {where}; torch already takes the widest dtype, so nothing is patched"
    if listed is not None:
        return f"{listed}: {where}"
    in_none = policy.origins.get(op.name, "in no list")  # or in one for a newer torch
    if op.promotes:
        return f"promote: {in_none}, and torch refuses mixed dtypes; to round its numbers would go wrong"
    if op.refuses_mixed:
        return f"first input: {in_none}, and torch refuses mixed dtypes, so the others follow the first"
    return f"none: {in_none}; torch's own function, untouched"


def reason_of_call(point: EntryPoint, seen: Seen, policy: Policy, frame: FrameType | None = None) -> str:
    """Say why one call, made in `frame`, was cast as it was, or was not."""
    op = catalog().get(point.op)
    if point.op == "to":
        overlay = overlay_that_casts(frame) if frame is not None else None
        return f"cast before the module's forward: {overlay.where}" if overlay else "cast by hand"
    if point.rule is not None and not seen.casting:
        if is_explicit(seen.args, seen.kwargs):
            return "left alone: the caller says dtype= or out="
        island = region_state.innermost()
        where = f"in torch.autocast(enabled=False) at {island.where}" if island.island else "casts are off here"
        return f"left alone: {where}"
    if op is None:
        return f"{point.rule}: {_where(point.op, policy) or 'by its decorator'}; a function of yours"
    if point.in_place:
        return "in place: it keeps its first tensor's dtype"
    return reason(op, policy)


def in_a_line(error: Exception) -> str:
    """Return an error's message in one line; raise an out-of-memory error again, as it is no matter of precision."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _where(name: str, policy: Policy, before: str = "") -> str:
    """Return where a name is listed; "" if it is not."""
    if not policy.listed(name):
        return ""
    origin = policy.origins.get(name)
    return before + (f"listed at {origin}" if origin else f"decided by opt_level {policy.opt_level}")


def _reason_of_parts(op: Op, policy: Policy) -> str:
    """Return the reason for an unlisted op: which parts it follows, or why it follows none."""
    if differing := policy.undecided(op):
        parts = ", ".join(f"{name} {rule}" for name, rule in differing.items())
        left = "the others follow the first" if op.refuses_mixed else "torch's own function, untouched"
        mixed = "its parts are in different lists"
        if not any(case.follows for case in policy.cases(op)):
            return f"{'first input' if op.refuses_mixed else 'none'}: in no list, and {mixed} ({parts}); {left}"
    cases = policy.cases(op)
    followed = [f"{name}, {_where(name, policy)}" for case in cases for name in case.follows]
    if not followed:
        return ""
    somewhere = "" if len(cases) == 1 else ", where its arguments make it run that"
    return f"{policy.rule(op) or 'none'}: in no list; follows {' and '.join(dict.fromkeys(followed))}{somewhere}"
