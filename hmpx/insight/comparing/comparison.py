"""`Comparison`: what `compare` found, to be printed and saved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hmpx.insight.comparing.page import as_page
from hmpx.insight.comparing.row import Found
from hmpx.insight.comparing.words import as_text
from hmpx.insight.text_table import terminal_width

SCHEMA = 1


@dataclass(frozen=True)
class Comparison(Found):
    """What lists do to a model, op by op. It prints as a table, the worst first.

    Attributes:
        rows: a `Row` for each call site. gradient_error, gradient_bias: of the lists as a whole, measured, in units of
            the noise between batches; above 0.1 the training is another one. NaN without a loss or with one batch.
        loss, loss_change: the FP32 loss, and what the lists add to it, means over batches.
        first_nonfinite: the row of the op where something first is not finite that is finite in FP32; None if nothing
            is. It is where that is seen; what is to blame stands in `broken`.
        rest: the gradient error of all ops together that do not break it alone, in one batch; NaN where that was not
            measured. together: the rows of a group that breaks it together where no single op does, as far as found.
        stopped: why the comparison could not go on, in words: FP32 itself is not finite, or the program raises under
            the lists outside of any op; "" where it did.
        passes: how many runs of the model it took. policy: the lists, as a file.

    `by_op()` and `by_module()` are sums, `worst(n)` the n rows that do most to the training, `broken` those that break
    it alone; `is_broken` says whether the lists as a whole do. `json(path)` saves everything, `as_json()` is the same
    as objects, `html(path)` a page.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> found = hmpx.compare(model, batches, loss)
        >>> [(row.op, row.rule, row.dtypes) for row in found.rows][0]
        ('linear', 'bf16', 'float32 -> bfloat16')
        >>> found.gradient_error < 0.1, found.first_nonfinite
        (True, None)
    """

    def as_json(self) -> dict[str, Any]:
        """The attributes, with `by_op` and `by_module`; what is not a number is null."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name[0] != "_"}
        rows = {"rows": self.rows, "by_op": self.by_op(), "by_module": self.by_module()}
        first = None if self.first_nonfinite is None else asdict(self.first_nonfinite)
        return plain(
            {"schema": SCHEMA, **found, "first_nonfinite": first} | {k: [*map(asdict, v)] for k, v in rows.items()}
        )

    def html(self, path: str | os.PathLike[str]) -> None:
        """Save as one HTML page that needs no network and no other file."""
        values = {**self.as_json(), "worst": plain([asdict(row) for row in self.worst(len(self.rows))])}
        Path(path).write_text(as_page(self, values), encoding="utf-8")

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save everything as JSON, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return as_text(self, terminal_width())


def plain(value: Any) -> Any:
    """Without NaN and inf, which JSON does not have: null, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
