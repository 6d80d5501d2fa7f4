"""Write what `hmpx.record` sees to CSV, and to TensorBoard where it is installed, while a model trains.

Run it with ``python examples/watch_precision.py [FOLDER]``. The ten lines to copy are those of `watch`.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hmpx

COLUMNS = ("step", "op", "module", "where", "calls", "casts", "bytes_cast", "cast_seconds", "op_seconds")


def watch(log: hmpx.Log, folder: Path) -> Callable[[], None]:
    """Return what makes each site a line of sites.csv and a point of two curves: sums from the beginning."""
    board = None
    if importlib.util.find_spec("tensorboard"):
        board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)
    with open(folder / "sites.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(COLUMNS)

    def write() -> None:
        rows = [site.as_json() for site in log.sites]
        with open(folder / "sites.csv", "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerows({"step": log.steps, **row} for row in rows)
        for row in rows if board else ():
            for key in ("casts", "cast_seconds"):
                board.add_scalar(f"{key}/{row['op']} {row['module'] or row['where']}", row[key], log.steps)

    return write


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hmpx.convert(), hmpx.record() as log:
        write = watch(log, folder)
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
            optimizer.step()
            if log.steps % 10 == 0:
                write()
    print(log)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "precision"))
