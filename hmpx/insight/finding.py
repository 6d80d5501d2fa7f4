"""`Finding`: one thing that a look has found, to be printed, saved, or answered by a recipe.

What is to be done is said in the words of the script's own loop, or of the trainer that owns it.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.base.raw import variables
from hmpx.insight.places import short_places
from hmpx.insight.report import Lines
from hmpx.ops.wrapping.callers import frames

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


def some(names: tuple[str, ...], most: int = 3) -> str:
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
