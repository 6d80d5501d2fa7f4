"""Trainers that own the loop and the optimizer, and what their users write in place of what acts on these."""

from __future__ import annotations

import re
import sys
from types import FrameType

from hmpx.base.raw import variables
from hmpx.ops.wrapping.callers import frames

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
