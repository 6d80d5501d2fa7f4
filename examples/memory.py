"""Train a character transformer with 8-bit optimizer state: what that saves, and what it costs in loss and time.

All rows with BF16 weights run the same ops in the same dtypes; they differ in the optimizer alone. bitsandbytes and
torchao have rows where they are installed (`pip install bitsandbytes torchao`); torchao's steps run as they are, since
compiling them takes longer than the training. A minute on two cores: three seeds, two trainings at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import multiprocessing
import time
from pathlib import Path

import charlm
import torch

import hmpx

LISTS = Path(hmpx.__file__).parent / "oplists" / "autocast-cuda"
FP32, BF16, OURS = "FP32 weights, AdamW", "BF16 weights, AdamW", "hmpx, bf16-sr-8bit"
WAYS = {  # the library that a row needs, the name of its optimizer, and the arguments
    FP32: ("torch.optim", "AdamW", {}),
    BF16: ("torch.optim", "AdamW", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao AdamW8bit, SR": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    OURS: ("torch.optim", "AdamW", {}),
}


def size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of a subclass, of the tensors in it."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def bytes_per_parameter(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    kept = [each for p in model.parameters() for each in (p, p.grad)]
    kept += [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    return sum(map(size, kept)) / sum(p.numel() for p in model.parameters())


def train(job: tuple[str, int, int]) -> tuple[float, float, float]:
    """The validation loss, the bytes a parameter, and the milliseconds of a core that an optimizer step takes."""
    way, seed, steps = job
    logging.getLogger("hmpx").setLevel(logging.ERROR)  # it warns of the second row, which is here to be seen
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    training, validation, characters = charlm.load_text()
    library, name, arguments = WAYS[way]
    torch.manual_seed(seed)
    charlm.LAYERS = 1
    model = charlm.CharTransformer(characters)
    model = model if way == FP32 else model.bfloat16()
    make = getattr(importlib.import_module(library), name)
    named = library == "torch.optim"  # bitsandbytes takes no names
    optimizer = make(model.named_parameters() if named else model.parameters(), lr=3e-4, **arguments)
    if way == OURS:
        hmpx.prepare(model, optimizer, "bf16-sr-8bit")
    elif way != FP32:
        lists = {f"{side}_file_path": LISTS / f"{side}.txt" for side in ("bf16", "fp32", "promote")}
        hmpx.convert(**lists, where="model")
    generator, spent = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        optimizer.zero_grad()
        charlm.loss_of(model, *charlm.batch(training, generator, charlm.BATCH // 2)).backward()
        started = time.process_time()
        optimizer.step()
        spent.append(time.process_time() - started)
    held = bytes_per_parameter(model, optimizer)
    hmpx.restore()
    with torch.no_grad():  # of the weights as they are, in FP32
        loss = charlm.validate(model.float(), validation)
    return loss, held, 1e3 * sorted(spent)[len(spent) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time, each on one core")
    options = parser.parse_args()
    ways = [way for way, (library, *_) in WAYS.items() if importlib.util.find_spec(library.partition(".")[0])]
    jobs = [(way, seed, options.steps) for seed in range(options.seeds) for way in ways]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        done = dict(zip(jobs, pool.imap(train, jobs), strict=True))
    print(f"{'':24} {'bytes/parameter':>15} {'validation loss':>17} {'above FP32':>17} {'ms/step':>10}")
    of_fp32 = [done[FP32, seed, options.steps][0] for seed in range(options.seeds)]
    for way in ways:
        losses, held, spent = zip(*(done[way, seed, options.steps] for seed in range(options.seeds)), strict=True)
        above = [a - b for a, b in zip(losses, of_fp32, strict=True)]
        behind = "" if way == FP32 else charlm.with_spread(above, "+")
        print(f"{way:24} {held[0]:15.2f} {charlm.with_spread(losses):>17} {behind:>17} {min(spent):10.1f}")


if __name__ == "__main__":
    main()
