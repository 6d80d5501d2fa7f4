"""`bench`: tables of time and memory."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hmpx.errors import HmpxError


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise HmpxError(f"device {name!r}: {str(error).splitlines()[0]}") from None


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no count")
    return number


def _bench(options: argparse.Namespace) -> int:
    # Here, so that the other commands do not pay for torch's profiler.
    with _in_a_checkout(options.what):
        from hmpx.bench import casts, insight, measure, rounding, step, train, tune

    device = _device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    tables: dict[str, list[Callable[[], measure.Bench]]] = {
        "rounding": [lambda: rounding.run(options.elements, options.repeat, device)],
        "step": [
            lambda: step.run(options.elements, options.repeat, device),
            lambda: step.run_lists(options.models, options.repeat, device),
        ],
        "casts": [lambda: casts.run(options.repeat, device), lambda: casts.run_kept(options.repeat, device)],
        "train": [lambda: train.run(options.repeat, device, options.models, not options.eager)],
        "insight": [lambda: insight.run(options.repeat, device, options.models)],
        "tune": [lambda: tune.run(device, options.models)],
    }
    _check_json(options.json)
    benches = []
    for table in tables[options.what]:
        benches.append(table())
        print("" if len(benches) == 1 else "\n", benches[-1], sep="")
    if options.json:
        measure.save(benches, options.json)
    return 0


@contextlib.contextmanager
def _in_a_checkout(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise HmpxError(
            f"bench {what} is no part of an installed hmpx ({error}): run it in a checkout; `bench memory` is"
        ) from None


def _launches(options: argparse.Namespace) -> int:
    with _in_a_checkout(options.what):
        from hmpx.bench import launches, measure

    _check_json(options.json)
    table = launches.run(options.params)
    print(table)
    if options.json:
        measure.save([table], options.json)
    return 0


def _gpu(options: argparse.Namespace) -> int:
    with _in_a_checkout(options.what):
        from hmpx.bench import gpu

    if not options.folder.is_dir():
        raise HmpxError(f"--folder {options.folder}: there is no such folder")
    short = gpu.run(options.folder, options.repeat, print)
    print(*(f"fell short: {each}" for each in short), f"written: {options.folder / 'hmpx-gpu.md'} and .json", sep="\n")
    return 1 if short else 0


def _memory(options: argparse.Namespace) -> int:
    from hmpx.bench import measure, memory

    _check_json(options.json)
    tables = memory.run(options.params, options.ranks, options.recipe, options.states)
    said = memory.notes(options.recipe)
    print(*tables, *(["\n".join(said)] if said else []), sep="\n\n")
    if options.json:
        measure.save(tables, options.json)
    return 0


def _check_json(path: Path | None) -> None:
    if path and not path.parent.is_dir():
        raise HmpxError(f"--json {path}: there is no folder {path.parent}")


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _size(text: str) -> float:
    number = float(text)
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of parameters")
    return number


def add(subparsers: argparse._SubParsersAction, prog: str) -> None:
    """The command `bench`, with one of its own for each table."""
    bench = subparsers.add_parser(
        "bench",
        help="time and memory, side by side with the peers that are installed",
        description="Measure on this machine, beside torch and the libraries that are installed. Every table\n"
        "names the device and the number of threads. `memory` and `launches` measure nothing.",
        epilog=f"examples:\n  {prog} bench rounding --threads 1\n  {prog} bench memory --params 7e9 --recipe lean",
    )
    what = bench.add_subparsers(required=True, metavar="TABLE", dest="what", title="tables")

    def add_one(name: str, words: str) -> argparse.ArgumentParser:
        sentence = f"{words[0].upper()}{words[1:]}."
        example = f"example:\n  {prog} bench {name} --json figures.json"
        command = what.add_parser(name, help=words, description=sentence, epilog=example)
        command.add_argument("--repeat", type=_count, default=15, metavar="N", help="timed rounds, default 15")
        command.add_argument("--threads", type=_count, metavar="N", help="of torch, default as it comes")
        command.add_argument("--device", default="cpu", help="of torch, default cpu")
        command.add_argument("--json", type=Path, metavar="FILE", help="the table as JSON too")
        command.set_defaults(run=_bench)
        return command

    for name, elements, words in (
        ("rounding", 8_400_000, "FP32 to BF16 by stochastic rounding"),
        ("step", 25_000_000, "an AdamW step in every way of holding weights"),
    ):
        command = add_one(name, words)
        command.add_argument("--elements", type=_count, default=elements, metavar="N", help=f"default {elements}")
    lists = ("toy", "resnet50", "bert-base", "gpt2-small")
    words = "models whose parameters get a table of their own, default all; GPT-2 takes 8 GB"
    command.add_argument("--models", nargs="*", choices=lists, default=lists, help=words)
    add_one("casts", "single ops, beside torch.autocast with the same lists")
    models = ("mlp", "convnet", "transformer")
    for name, words in (
        ("insight", "what `record` and `compare` cost, beside a plain step"),
        ("tune", "`tune` beside falling back one op at a time, once each"),
        ("train", "whole models, beside torch.autocast with the same lists"),
    ):
        command = add_one(name, words)
        command.add_argument("--models", nargs="+", choices=models, default=models, help="default all")
    command.add_argument("--eager", action="store_true", help="without compiled models, which take minutes")

    command = what.add_parser(
        "launches",
        help="what a step tells an accelerator, counted without one",
        description="Calls, waits of the host and bytes of an AdamW step, for every way to hold weights and state.\n"
        "Counted on the meta device: nothing is computed, so a model of any size takes a minute.",
        epilog=f"example:\n  {prog} bench launches --params 537e6",
    )
    command.add_argument(
        "--params", type=_size, nargs="+", default=[1e6, 537e6, 7e9], metavar="N", help="default 1e6 537e6 7e9"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="the table as JSON too")
    command.set_defaults(run=_launches)

    command = what.add_parser(
        "gpu",
        help="all of it on this GPU, and what fell short of what is expected",
        description="The tests that want a GPU, and every table on it, in about ten minutes. It writes\n"
        "hmpx-gpu.json and hmpx-gpu.md, a page to send. Exit status 1: something fell short; 2: there is no GPU.",
        epilog=f"example:\n  {prog} bench gpu --folder /tmp",
    )
    command.add_argument("--repeat", type=_count, default=15, metavar="N", help="timed rounds, default 15")
    command.add_argument("--folder", type=Path, default=Path(), metavar="FOLDER", help="for both files, default here")
    command.set_defaults(run=_gpu)

    command = what.add_parser(
        "memory",
        help="what a model takes on each rank, computed for every way to hold weights",
        description="What a model that need not exist takes on each rank: bytes per parameter by what they are for,\n"
        "and GiB by how it is distributed. A way to distribute that a recipe refuses has no row; a note says why.",
        epilog=f"example:\n  {prog} bench memory --params 7e9 --ranks 1,8,64 --recipe nxd-standard lean",
    )
    command.add_argument("--params", type=_size, default=7e9, metavar="N", help="of the model, default 7e9")
    command.add_argument("--ranks", type=_counts, default=[1, 8, 64, 512], metavar="N,...", help="default 1,8,64,512")
    command.add_argument("--recipe", nargs="+", default=[], metavar="NAME", help="default: every way to hold weights")
    command.add_argument(
        "--states", type=int, choices=range(9), default=2, help="tensors the optimizer keeps, default 2"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="the tables as JSON too")
    command.set_defaults(run=_memory)
