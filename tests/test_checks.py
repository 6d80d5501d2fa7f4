"""What is read and not run: lint, format, types, and which file may import which."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hmpx

ROOT = Path(__file__).parent.parent
FLOORS = (
    "errors version",
    "base",
    "rounding",
    "ops updates",  # each stands without the other
    "conversion regions",
    "recipes",
    "hmp",
    "insight integrations",
    "hmpx",  # the public names
    "shell",
    "__main__",
)
FLOORS_WITHIN = {"ops": "policies wrapping computing", "updates": "holding stepping"}
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([sys.executable, "-m", name, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_finds_nothing(command):
    done = tool("ruff", *command.split(), "hmpx", "tests", "examples")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_and_a_users_code_are_type_checked():
    """`tests/typed/public.py` says what each public name takes and gives back."""
    has_cache = (ROOT / ".mypy_cache").exists()  # a new one takes a fifth of the time, and a copy's is read by nobody
    done = tool("mypy", *([] if has_cache else ["--cache-dir", os.devnull]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_typed_file_uses_every_public_name():
    tree = ast.parse((ROOT / "tests" / "typed" / "public.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(hmpx.__all__) <= used | imported


@functools.cache
def sources(package: Path = ROOT / "hmpx") -> dict[str, ast.Module]:
    """The files of the package by the name they are imported by."""
    found = {}
    for path in package.rglob("*.py"):
        parts = ("hmpx", *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def test_a_class_has_a_name_of_its_own():
    """A reader who meets a name finds one class of it."""
    rooms: dict[str, list[str]] = {}
    for room, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms.setdefault(node.name, []).append(room)
    assert {name: where for name, where in rooms.items() if len(where) > 1} == {}


def test_text_is_read_and_written_as_utf_8():
    """Whatever the encoding of the system is."""
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", None) or f"{getattr(node.func, 'id', '')}()"
                is_text = called in ("read_text", "write_text", "open()")
                if is_text and not any(
                    isinstance(each, ast.Constant) and each.value in ("rb", "wb") for each in node.args
                ):
                    assert "encoding" in [each.arg for each in node.keywords], f"{name}:{node.lineno}"


def imports(tree: ast.Module, files: set[str]) -> Iterator[str]:
    """The files of hmpx that one imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & files
            if names - files:
                yield node.module


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def floor_within(module: str) -> int:
    """Inside of its room: a room's own files stand above its floors; -1 is beside them."""
    parts, floors = module.split("."), FLOORS_WITHIN.get(room(module), "").split()
    if len(parts) < 4:
        return len(floors)
    return floors.index(parts[2]) if parts[2] in floors else -1


def wrong_ways(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a higher floor, of another room on the same one, or of a higher floor of the same room."""

    def is_wrong(file: str, other: str) -> bool:
        if room(file) != room(other):
            return FLOOR[room(other)] >= FLOOR[room(file)]
        return floor_within(other) > floor_within(file) >= 0

    return [f"{file} imports {other}" for file, others in graph.items() for other in others if is_wrong(file, other)]


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The files that import themselves by way of others: what is left when those without imports are taken away."""
    left = {file: set(others) for file, others in graph.items()}
    while leaves := {file for file, others in left.items() if not others & left.keys()}:
        left = {file: others for file, others in left.items() if file not in leaves}
    return set(left)


@functools.cache
def graph() -> dict[str, set[str]]:
    trees = sources()
    return {file: set(imports(tree, set(trees))) for file, tree in trees.items()}


def test_every_room_has_a_floor():
    assert {room(file) for file in graph()} == set(FLOOR)


def test_no_file_imports_a_higher_floor():
    assert wrong_ways(graph()) == []


def test_no_file_imports_itself_by_way_of_others():
    assert circles(graph()) == set()


def test_what_several_tests_use_stands_in_support():
    """A file of tests imports no other one, so each can move and be run alone."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
                assert not node.level and not any(name.split(".")[-1].startswith("test_") for name in names), path
