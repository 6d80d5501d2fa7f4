"""Change the package in one small place at a time, and see whether a test notices.

    python -m tests.support.mutants --count 165 --seed 3 --jobs 2

takes a seeded sample of the changes that plausible mistakes would be, at least one of each file: a condition turned
round, a statement forgotten, a number one off, the last in the place of the first, `and` for `or`, a keyword left out.
For each, the near tests that run the changed function are run on a copy of the checkout, quick ones first, until one
fails or their time is up. It prints the survivors and a table; whether a survivor changes anything is for a person to
say. Which tests run which functions is found out first, and is kept in the folder that `--keep` names.

Processes are forked from one that has imported torch and pytest, and neither hmpx nor its tests.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
ROADS = ("base", "ops", "updates", "recipes", "rounding", "insight")
FILES = ("conversion.py", "regions.py")
WHOLE = "changes conversion docstrings installation process_state region_situations regions torch_private undo"
NEAR = ("tests/ops", "tests/updates", "tests/recipes", "tests/rounding", "tests/insight")
NEAR = (*NEAR, *(f"tests/test_{name}.py" for name in WHOLE.split()))
SLOW = ("test_opinfo", "test_equivalence", "test_torch_features", "test_sharding", "test_replicas", "test_agreement")
SLOW = (*SLOW, "test_distributed_checkpoints", "test_run", "test_compile", "test_composition", "test_layouts")
PATIENCE = 600  # seconds of the clock, after which the change is one that hangs

SWAPS = {
    **{ast.Is: "is not", ast.IsNot: "is", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Add: "-", ast.Sub: "+", ast.Mult: "+"},
    **{ast.And: "or", ast.Or: "and"},
}


class Mutant(NamedTuple):
    """`text` in the place of the characters from `start` to `stop` of a file, inside of the function of that line."""

    file: str
    line: int
    function: int | None
    start: int
    stop: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]

    def __str__(self) -> str:
        source = (ROOT / self.file).read_text()
        before, after = (" ".join(each.split()) for each in (source[self.start : self.stop], self.text))
        return f"{self.file}:{self.line}: {before[:90]} -> {after[:90] or 'nothing'}"


def mutants(file: str) -> Iterator[Mutant]:
    """Every one of a file."""
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line.decode()))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(source[starts[line - 1] :].encode()[:column].decode())

    def made(node: Any, text: str, function: int | None) -> Mutant:
        ends = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        return Mutant(file, node.lineno, function, *ends, text)

    def walk(node: ast.AST, function: int | None) -> Iterator[Mutant]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno)
            function = first
        yield from ((made(where, text, function)) for where, text in changes(node))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.JoinedStr, ast.Raise)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, function)

    yield from walk(ast.parse(source), None)


def changes(node: Any) -> Iterator[tuple[Any, str]]:
    """What may be written for a node, or for a part of it."""
    text = ast.unparse
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield node, f"({text(node.left)} {SWAPS[type(node.ops[0])]} {text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        yield node, "(" + f" {SWAPS[type(node.op)]} ".join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, f"(({text(node.left)}) {SWAPS[type(node.op)]} ({text(node.right)}))"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({text(node.operand)})"
    elif isinstance(node, (ast.If, ast.IfExp)) and text(node.test) != "TYPE_CHECKING":
        yield node.test, f"(not ({text(node.test)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    elif _is_forgettable(node):
        yield node, "pass"
    elif isinstance(node, ast.Return) and node.value is not None and text(node.value) != "None":
        yield node, "return None"
    elif isinstance(node, ast.Subscript) and text(node.slice) in ("0", "-1"):
        yield node.slice, "-1" if text(node.slice) == "0" else "0"
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        kept = ast.Call(node.func, node.args, node.keywords[:-1])
        yield node, text(kept)


def _is_forgettable(node: Any) -> bool:
    """Whether a node is a statement without which the code would run all the same."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.Delete, ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def sample(files: list[str], count: int, seed: int) -> list[Mutant]:
    """At least one of each file, and of larger files more."""
    drawn = random.Random(seed)
    every = {file: drawn.sample(found, len(found)) for file in files if (found := [*mutants(file)])}
    chosen = {file: 1 for file in every}
    while sum(chosen.values()) < min(count, sum(map(len, every.values()))):
        chosen[max(every, key=lambda file: (len(every[file]) - chosen[file]) / (chosen[file] + 0.5) ** 2)] += 1
    return [mutant for file, found in every.items() for mutant in found[: chosen[file]]]


class Functions:
    """A plugin of pytest: the functions of the package that each test calls, by file and line, and its seconds."""

    def __init__(self, package: str) -> None:
        self._package, self.found = package, {}

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        codes: set[Any] = set()

        def look(frame: Any, event: str, _: Any) -> None:
            codes.add(frame.f_code)

        started = time.process_time()
        threading.settrace(look)
        sys.settrace(look)
        self._stop = lambda: self._keep(item.nodeid, codes, time.process_time() - started)

    def pytest_runtest_logfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self._stop()

    def _keep(self, test: str, codes: set, seconds: float) -> None:
        ours = {(c.co_filename[len(self._package) :], c.co_firstlineno) for c in codes if self._is_ours(c)}
        self.found[test] = seconds, sorted(ours)

    def _is_ours(self, code: Any) -> bool:
        return code.co_filename.startswith(f"{self._package}hmpx/")


def forked(work: Callable[[], int], seconds: float) -> int | None:
    """What `work` returns in a process of its own; None if it takes too long."""
    pid = os.fork()
    if not pid:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            os._exit(work())
        finally:
            os._exit(99)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def pytest_in(folder: Path, arguments: list[str], plugins: tuple = ()) -> int:
    import pytest

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # those of the checkout, of which this is a copy
    return int(pytest.main(["-o", "addopts=", "-q", "-p", "no:cacheprovider", *arguments], plugins=[*plugins]))


def covering(folder: Path, keep: Path) -> dict[str, tuple[float, list]]:
    """Seconds and functions of each near test, found out once."""

    def work() -> int:
        functions = Functions(f"{folder}/")
        options = [f"--ignore-glob=*{name}*" for name in SLOW]
        pytest_in(folder, [*NEAR, "-m", "not slow", *options], (functions,))
        keep.write_text(json.dumps(functions.found))
        return 0

    if not keep.exists():
        forked(work, 3600)
    return json.loads(keep.read_text())


def tests_of(mutant: Mutant, found: dict[str, tuple[float, list]], seconds: float) -> list[str]:
    """Those that run the function of the mutant, or anything of its file where it is in none.

    One variant of each first, the quick ones before the others; then, as long as there is time, more variants.
    """
    meant = [mutant.file, mutant.function]
    running = {t: s for t, (s, ran) in found.items() if meant in ran}
    if not running or mutant.function is None:
        running = {t: s for t, (s, ran) in found.items() if any(file == mutant.file for file, _ in ran)}
    running = running or {t: s for t, (s, _) in found.items()}  # a file of constants
    variants: collections.Counter[str] = collections.Counter()
    turns = {}
    for test in sorted(running, key=running.__getitem__):
        name = test.partition("[")[0]
        turns[test] = variants[name], running[test]
        variants[name] += 1
    chosen, spent = [], 0.0
    for test in sorted(turns, key=turns.__getitem__):
        if spent + running[test] <= seconds:
            spent += running[test]
            chosen.append(test)
    return chosen


def copied(folder: Path) -> Path:
    for name in ("hmpx", "tests", "oplists", "examples"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def outcome(mutant: Mutant, place: Path, tests: list[str]) -> str:
    """In a copy of the checkout that belongs to this process."""
    folder = place / str(os.getpid())
    if not folder.exists():
        copied(folder)
    path = folder / mutant.file
    source, times = path.read_text(), path.stat()
    path.write_text(mutant.applied(source))
    try:
        status = forked(lambda: pytest_in(folder, ["-x", *tests]), PATIENCE)
        return {0: "survives", None: "hangs"}.get(status, "caught")
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="the first ones of the sample")
    parser.add_argument("--seconds", type=float, default=60, help="of tests, by the time they took under a tracer")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which wants a core of its own")
    parser.add_argument("--only", default="", help="a pattern that the names of files fit")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "hmpx-mutants.json")
    options = parser.parse_args()
    import torch._dynamo  # noqa: F401

    sys.dont_write_bytecode = True
    files = [f"hmpx/{name}" for name in FILES]
    files += [str(p.relative_to(ROOT)) for road in ROADS for p in sorted((ROOT / "hmpx" / road).rglob("*.py"))]
    caught: dict[str, list[bool]] = collections.defaultdict(list)
    drawn = sample([file for file in files if re.search(options.only, file)], options.count, options.seed)
    processes = concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork"))
    with tempfile.TemporaryDirectory() as place, processes:
        found = covering(copied(Path(place) / "covering"), options.keep)
        tests = {mutant: tests_of(mutant, found, options.seconds) for mutant in drawn[options.skip :]}
        running = {processes.submit(outcome, mutant, Path(place), tests[mutant]): mutant for mutant in tests}
        for done in concurrent.futures.as_completed(running):
            mutant = running[done]
            caught[mutant.file].append(done.result() != "survives")
            print(f"{done.result():<8}  {mutant}  ({len(tests[mutant])} tests)", flush=True)
    print("\n| file | mutants | caught |\n|---|---|---|")
    for file, each in sorted(caught.items()):
        print(f"| `{file.removeprefix('hmpx/')}` | {len(each)} | {sum(each)} |")
    everything = [one for each in caught.values() for one in each]
    print(f"| all | {len(everything)} | {sum(everything)} |")


if __name__ == "__main__":
    main()
