"""The command line: a table of figures each, measured on this machine beside torch and the libraries that are here."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import casts, gpu, host, measure, updates
from bench.measure import Bench
from hmpx.errors import HmpxError
from hmpx.shell.options import add_force, check_outputs, outputs_asked

_PROG = "python examples/bench"
_LISTS = ("toy", "resnet50", "bert-base", "gpt2-small")
_MODELS = ("mlp", "convnet", "transformer")


def main(arguments: list[str] | None = None) -> int:
    """Print one table. Exit status 1: a figure exceeds its limit; 2: an error, which is said."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except HmpxError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _tables(options: argparse.Namespace) -> Iterator[Bench]:
    """Yield each table as it is made."""
    repeat, device = options.repeat, _device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.what == "host":
        yield host.run(repeat, device, options.tensors, options.only)
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.what == "rounding":
        yield updates.rounding(options.elements, repeat, device)
    elif options.what == "step":
        yield updates.step(options.elements, repeat, device)
        yield updates.steps_of_models(options.models, repeat, device)
    elif options.what == "casts":
        yield casts.run(repeat, device)
        yield casts.run_kept(repeat, device)
    else:
        yield casts.run_models(repeat, device, options.models, not options.eager)


def _bench(options: argparse.Namespace) -> int:
    outputs_asked(options, "json")
    benches = []
    for table in _tables(options):
        benches.append(table)
        print("" if len(benches) == 1 else "\n", table, sep="")
    if options.json:
        measure.save(benches, options.json)
    return _tell_short(host.exceeded(benches[0])) if options.what == "host" else 0


def _gpu(options: argparse.Namespace) -> int:
    if unknown := [part for part in options.parts if part not in gpu.ALONE]:
        raise HmpxError(f"gpu {unknown[0]}: there is no such part; there are {', '.join(gpu.ALONE)}")
    say = functools.partial(print, flush=True)
    if len(options.parts) == 1:
        outputs_asked(options, "json")
        short = gpu.run_one(options.parts[0], options.repeat, options.json, say)
    else:
        if not options.folder.is_dir():
            raise HmpxError(f"--folder {options.folder}: there is no such folder")
        check_outputs(options, {"folder": options.folder / "hmpx-gpu.md", "folder ": options.folder / "hmpx-gpu.json"})
        short = gpu.run(options.parts or [*gpu.PARTS], options.folder, options.repeat, say)
        say(f"written: {options.folder / 'hmpx-gpu.md'} and .json")
    return _tell_short(short)


def _tell_short(short: list[str]) -> int:
    for each in short:
        print(f"fell short: {each}")
    return 1 if short else 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Measure on this machine, beside torch and the libraries that are installed. Every table\n"
        "names the device and the number of threads.",
        epilog=f"example:\n  {_PROG} rounding --threads 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(required=True, metavar="TABLE", dest="what", title="tables")

    def add_one(name: str, words: str, description: str = "", example: str = "--json figures.json", run=_bench):
        command = what.add_parser(
            name,
            help=words,
            description=description or f"{words[0].upper()}{words[1:]}.",
            epilog=f"example:\n  {_PROG} {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON too; of gpu, of one part")
        add_force(command)
        return command

    def add_measured(name: str, words: str, models: tuple[str, ...] = (), elements: int = 0) -> argparse.ArgumentParser:
        command = add_one(name, words)
        _add_repeat(command)
        command.add_argument("--threads", type=_count, metavar="N", help="of torch, default as it comes")
        command.add_argument("--device", default="cpu", help="of torch, default cpu")
        if elements:
            command.add_argument("--elements", type=_count, default=elements, metavar="N", help=f"default {elements}")
        if models:
            command.add_argument("--models", nargs="+", choices=models, default=models, help="default all")
        return command

    add_measured("rounding", "FP32 to BF16 by stochastic rounding", elements=8_400_000)
    command = add_measured("step", "an AdamW step in every way of holding weights", elements=25_000_000)
    words = "models whose parameters get a table of their own, default all; GPT-2 takes 8 GB"
    command.add_argument("--models", nargs="*", choices=_LISTS, default=_LISTS, help=words)
    add_measured("casts", "single ops, beside torch.autocast with the same lists")
    command = add_measured("train", "whole models, beside torch.autocast with the same lists", _MODELS)
    command.add_argument("--eager", action="store_true", help="without compiled models, which take minutes")

    command = add_one(
        "host",
        "what a step costs the host of a GPU, beside torch's own; no GPU is needed",
        "Microseconds of the host a step and a tensor, for every way to hold weights and state, beside torch's fused\n"
        "step, in turns. Without a GPU nothing is launched, and the rest runs as it does on one (Triton is needed).\n"
        "`ratio` is to torch's step. Exit status 1: a row exceeds its limit.",
        "--tensors 293 --only fused",
    )
    _add_repeat(command, 7)
    words = "of the model, default 20 293 1000"
    command.add_argument("--tensors", type=_count, nargs="+", default=[20, 293, 1000], metavar="N", help=words)
    command.add_argument("--only", default="", metavar="TEXT", help="rows with this in their names")
    command.add_argument("--device", help="of torch; default a GPU, or cpu where there is none")

    command = add_one(
        "gpu",
        "all of it on this GPU, and what fell short of what is expected",
        "The tests that want a GPU, then tables on it: rounding, step, models, host, train. In at most six minutes it\n"
        "writes hmpx-gpu.json and hmpx-gpu.md, a page to send. One part alone is printed and written nowhere;\n"
        "`fp8` is only run so: blocks in BF16 and FP8, eager and compiled, beside torchao.\n"
        "Exit status 1: something fell short; 2: there is no GPU.",
        "--folder /tmp",
        _gpu,
    )
    _add_repeat(command, 7)
    words = "tests, rounding, step, models, host, train or fp8; default all but fp8"
    command.add_argument("parts", nargs="*", metavar="PART", help=words)
    command.add_argument("--folder", type=Path, default=Path(), metavar="FOLDER", help="for both files, default here")
    return parser


def _add_repeat(command: argparse.ArgumentParser, rounds: int = 15) -> None:
    command.add_argument("--repeat", type=_count, default=rounds, metavar="N", help=f"timed rounds, default {rounds}")
