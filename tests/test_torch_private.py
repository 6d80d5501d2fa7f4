"""The list of torch's private names is complete, has no name that nobody uses, and says what a new torch has lost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hmpx
from hmpx.base import torch_private
from hmpx.base.torch_private import NAMES, lost

PACKAGE = Path(hmpx.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "torch_private.py"]
OTHERS = frozenset(  # of Python's own library, of namedtuples, torchao's, Accelerate's and lion_pytorch's
    """
    _getframe _current_frames _get_running_loop _lru_cache_wrapper _replace _fields _asdict _dlopen _SubParsersAction
    _at_fork_reinit _target _AdamW _fp32_to_bf16_sr _shared_state _init_lr _signal _instances _exit
    """.split()
)
LISTED = frozenset(part for name in NAMES for part in re.split(r"\W+", name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that hmpx defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []


def private_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names used as attributes, imported, asked for as strings, or part of a string that is a dotted name in torch."""
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            words = [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            if not module.startswith("hmpx"):
                words = [*module.split("."), *(part for alias in node.names for part in alias.name.split("."))]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            words = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+\.?", str(node.value)):
            words = node.value.split(".")
        yield from ((word, node.lineno) for word in words if is_private(word))


def unlisted(trees: dict[str, ast.Module]) -> list[str]:
    own = {name for tree in trees.values() for name in own_names(tree)}
    return [
        f"{file}:{line}: {name}"
        for file, tree in trees.items()
        for name, line in private_names(tree)
        if name not in own | OTHERS | LISTED
    ]


def test_the_installed_torch_has_lost_none():
    assert [f"{name}: {NAMES[name]}" for name in lost()] == []


def test_what_is_lost_is_told(monkeypatch):
    gone = [
        "torch._C._no_such_function",
        "torch._no_such_module.name",
        "torch.optim.Optimizer()._no_such_attribute",
        "torch.distributed.fsdp._common_utils:fsdp_flattened",  # a word, of which there are only longer ones
    ]
    monkeypatch.setattr(torch_private, "NAMES", dict.fromkeys((*gone, *NAMES)))
    assert lost() == gone


def test_every_private_name_in_the_package_is_listed():
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in FILES}
    assert unlisted(trees) == []
    sample = "import torch._new\nx._surely_new(torch._C)\ngetattr(x, '_asked')\nname = 'torch.nn._named'"
    found = unlisted({"sample.py": ast.parse(sample)})
    assert sorted(line.rpartition(" ")[2] for line in found) == ["_asked", "_named", "_new", "_surely_new"]


def test_every_listed_name_is_used():
    source = "\n".join(path.read_text("utf-8") for path in FILES)
    last = {re.split(r"\W+", name)[-1]: name for name in NAMES}
    assert [name for word, name in last.items() if not re.search(rf"\b{word}\b", source)] == []
