"""``bench tune``: `hmpx.tune` beside the usual way, in which one op after another falls back to FP32."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

import torch

from hmpx.bench import measure
from hmpx.bench.train import Training, loss_of
from hmpx.insight import observed
from hmpx.insight.trials.calls import Asked, CallSite, Compute, by_site, exactly, in_its_inputs_dtype
from hmpx.insight.trials.runs import Effect, Progress, Runs
from hmpx.insight.trials.subject import Subject
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.worth import decidable
from hmpx.ops.policies.policy import Policy

_BATCHES, _HELD_OUT = 4, 2
_ASKED = 0.5  # of the gradient error that everything in BF16 makes


def run(device: torch.device, models: Sequence[str]) -> measure.Bench:
    """Count forward and backward passes, and seconds, until half of the gradient error of everything in BF16 is left.

    ``one by one``: each call site alone is put into FP32 and measured; then they fall back together, what helped most
    first, until the error, and that of the loss, is as small. ``share``: of the FLOPs of matrix products, in BF16.
    """
    rows = []
    for name in models:
        print(f"tuning {name}", file=sys.stderr)
        model = Training(name, device)
        batches = [(torch.randn_like(model.inputs), model.targets) for _ in range(_BATCHES + _HELD_OUT)]
        usual = _OneByOne(model.model, batches)
        began = perf_counter()
        left = usual.run()
        seconds = perf_counter() - began
        figures = {"asked": usual.asked, "passes": usual.passes, "s": seconds, "error": left.gradient_error}
        rows.append(measure.Line(f"{name}, one by one, {usual.sites} sites", figures))
        began = perf_counter()
        found = tune(model.model, batches, loss_of, tolerance=usual.asked, progress=False)
        seconds = perf_counter() - began
        figures = {"asked": usual.asked, "passes": found.steps, "s": seconds, "error": found.gradient_error}
        rows.append(measure.Line(f"{name}, tune", figures | {"share": found.share}))
    return measure.Bench(f"Half of BF16's gradient error, {measure.where(device)}", rows)


class _OneByOne:
    """The usual way, on the last of the batches; the others are for the noise.

    asked: the error; passes: forward and backward; sites: how many can fall back.
    """

    def __init__(self, model: torch.nn.Module, batches: list[tuple]) -> None:
        self._subject = Subject(model, batches, loss_of, None)
        self._progress = Progress("one by one", False)
        self._runs = Runs(self._subject, self._progress, loss_counts=True)
        self._held_out = [*range(_BATCHES, len(batches))]
        self._sites: dict[CallSite, None] = {}
        self.asked = 0.0

    @property
    def passes(self) -> int:
        return self._progress.done - _BATCHES

    @property
    def sites(self) -> int:
        return len(self._sites)

    def run(self) -> Effect:
        everything = Policy(bf16=tuple(sorted(decidable())))
        with self._subject.gradients_kept(), observed.observed(everything, "auto", self._runs):
            for number in range(len(self._subject.batches)):
                self._runs.exact(number)
            self._runs.find_noise()
            self.asked = _ASKED * self._without(set()).gradient_error
            worst = sorted(self._sites, key=lambda site: self._without({site}).size)
            fallen: set[CallSite] = set()
            for site in worst:
                fallen.add(site)
                effect = self._without(fallen)
                if effect.size <= self.asked:
                    break
            return effect

    def _without(self, fallen: set[CallSite]) -> Effect:
        """Measure everything in BF16 but some sites."""

        def compute_of(site: CallSite) -> Compute:
            if site.op not in decidable():
                return in_its_inputs_dtype
            self._sites.setdefault(site)
            return exactly if site in fallen else Asked.plainly

        return self._runs.effect(by_site(compute_of), self._held_out, "one by one")
