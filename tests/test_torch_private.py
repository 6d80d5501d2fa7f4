"""Names of torch that torch does not document: all are listed, and without one of them only its feature is off."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.metadata
import torch.utils.benchmark
import torch.utils.flop_counter

import hmpx
from hmpx.base.torch_features import _NOTHING, Feature, Name, exists
from hmpx.base.torch_private import FEATURES, lacks, private
from hmpx.shell.main import main
from tests.support import python

PACKAGE = Path(hmpx.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "torch_private.py"]
WITHOUT = Path(__file__).parent / "support" / "without_names.py"
LISTED = {word for feature in FEATURES for name in feature.names for word in re.findall(r"\w+", name)}
# Words of Python's own objects, of namedtuples, of and of other libraries than torch
OTHERS = frozenset(
    """
    _AdamW _SubParsersAction _actions _asdict _at_fork_reinit _current_frames _dlopen _fields _fp32_to_bf16_sr
    _get_running_loop _getframe _init_lr _lru_cache_wrapper _replace _shared_state _signal _target bitcast
    construct_object dest element_ty get_dtype get_shape get_single_node get_slice get_total_flops global_step
    is_replicate option_strings problem_mark returncode start_mark start_ns submodule_search_locations total_memory
    """.split()
)
# Documented, without words of their own
NAMED = "torch.ops.hmpx.", "torch.backends.mkldnn.is_available", "torch.BFloat16Tensor"


def test_the_installed_torch_has_lost_none():
    assert [feature.title for feature in FEATURES if feature.missing] == []


def test_names_of_each_kind_are_looked_for():
    there = "torch.matmul", "torch.optim.Optimizer()._optimizer_step_pre_hooks", "torch.autocast()._enabled"
    gone = (
        *("torch._C._no_such_function", "torch._no_such_module.name", "torch.optim.Optimizer()._no_such_attribute"),
        "torch.distributed.fsdp._common_utils:fsdp_flattened",  # a word, of which there are only longer ones
    )
    assert [name for name in (*there, *gone) if exists(name)] == list(there)


def test_a_feature_is_off_where_a_name_is_missing_and_says_so_once(caplog):
    gone, other = "torch._C._no_such_function", "torch._C._nor_this"
    feature = Feature("sums", "they are slow", Name("torch.matmul", "adds"), Name(gone, "adds"), Name(other, "", min))
    assert not feature.is_on() and not feature.is_on()
    assert caplog.messages == [f"hmpx: sums: torch {torch.__version__} has no {gone}, so they are slow"]
    assert feature.get(other) is min
    with pytest.raises(hmpx.HmpxError, match="they are slow"):
        feature.get(gone)()
    with pytest.raises(hmpx.HmpxError, match="they are slow"):
        feature.require()


# Without each name


def without(*names: str) -> dict:
    done = python.run(WITHOUT, *names, env={**python.environment(), "HMPX_RECIPE": ""})
    assert done.returncode == 0, f"{names}: {done.stderr[-1500:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check_without(names: list[str], whole: dict) -> None:
    """Each feature that needs one of these names is off and no other; weights have the bits that they have with all."""
    found = without(*names)
    needs = {f.title: [path for path, name in f.names.items() if name.stand_in is _NOTHING] for f in FEATURES}
    below = tuple(name + after for name in names for after in (".", "("))  # what is in a name goes with it
    wanted = [title for title, paths in needs.items() if any(path in names or path.startswith(below) for path in paths)]
    assert found["off"] == wanted, names
    assert found["bits"] == whole["bits"][: len(found["bits"])], names
    sentences = [each for each in found["said"] if any(each.startswith(f"hmpx: {title}: torch") for title in wanted)]
    assert sorted(sentences) == sorted(set(found["said"])) and len(sentences) == len(wanted), found["said"]


@pytest.fixture(scope="module")
def whole() -> dict:
    return without()


def test_without_names_training_has_the_same_bits(whole):
    """All at once: those that something stands in for, then those that switch a feature off."""
    assert whole["off"] == whole["said"] == [] and whole["bits"][2] == whole["bits"][3]
    needed = [path for f in FEATURES for path, name in f.names.items() if name.stand_in is _NOTHING]
    check_without([path for feature in FEATURES for path in feature.names if path not in needed], whole)
    check_without(needed, whole)


@pytest.mark.slow
def test_without_each_name_training_has_the_same_bits(whole):
    for path in dict.fromkeys(path for feature in FEATURES for path in feature.names):
        check_without([path], whole)


# What the code uses beyond the list


def documented(path: str) -> bool:
    """Whether torch documents a dotted name: in the `__all__` of a public module, or else with words of its own."""
    if path.startswith(NAMED):
        return True
    found, module = torch, torch
    for part in path.split(".")[1:]:
        if part.startswith("_") and not part.endswith("__"):
            return False
        if isinstance(found, types.ModuleType):
            module, exported = found, getattr(found, "__all__", [part])
            exported = exported if isinstance(exported, list | tuple) else ()
            found = sys.modules.get(f"{module.__name__}.{part}") or getattr(found, part, None)
            is_module = isinstance(found, types.ModuleType) and found.__name__ == f"{module.__name__}.{part}"
            is_plain = not callable(found) or bool(getattr(found, "__doc__", None))
            if not (is_module or part in exported or is_plain):
                return False
        else:
            found = getattr(found, part, None)
            if isinstance(found, types.FunctionType) and not found.__doc__ and not part.startswith("__"):
                return False
    return True


def known_words() -> set[str]:
    """Words that attributes have in Python, in other libraries, and in what torch documents."""
    imported = {path.partition(".")[0] for tree in trees().values() for path in roots(tree).values()}
    places: list[object] = [builtins, types, *(sys.modules[each] for each in ("os.path", "yaml.nodes", "yaml.reader"))]
    places += [importlib.import_module(each) for each in sorted(imported & sys.stdlib_module_names)]
    words = {word for place in places for word in dir(place)}
    words |= {w for place in places for each in list(vars(place).values()) if isinstance(each, type) for w in dir(each)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and not re.search(r"\._|_internal|testing", name):
            words |= set(name.split("."))
            for word in dir(module):
                if documented(f"{name}.{word}"):
                    words.add(word)
                    words |= set(_members(getattr(module, word, None)))
    return words


def _members(cls: object) -> Iterator[str]:
    if isinstance(cls, type):
        init = vars(cls).get("__init__")
        own = init.__code__.co_names if isinstance(init, types.FunctionType) else ()
        for word in (*dir(cls), *own, *inspect.get_annotations(cls)):
            found = getattr(cls, word, None)
            if not word.startswith("_") and not (isinstance(found, types.FunctionType) and not found.__doc__):
                yield word


def own_names() -> Iterator[str]:
    """Names that hmpx defines: functions, classes, arguments, variables, attributes."""
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith("--"):  # an option of the shell
            yield node.value[2:].replace("-", "_")
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier() and not str(node.value).startswith("_"):
            yield str(node.value)  # of an attribute that is set by its name


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in FILES}


def roots(tree: ast.Module) -> dict[str, str]:
    """What each name that a file imports from elsewhere means."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                found |= {each.asname: each.name} if each.asname else {top: top}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hmpx"):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def unlisted(trees: dict[str, ast.Module], known: set[str]) -> Iterator[str]:
    """Where code uses a name of torch that is not documented, and does not ask for it in `torch_private`."""
    for file, tree in trees.items():
        means = roots(tree)
        for name in means.values():
            if name.startswith("torch.") and not documented(name):
                yield f"{file}: import {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                root, _, rest = ast.unparse(node).partition(".")
                path = f"{means.get(root)}.{rest}"
                if root in means and re.fullmatch(r"[\w.]+", rest):
                    is_torchs = path.startswith("torch.") and documented(path.rpartition(".")[0])
                    if is_torchs and not documented(path):
                        yield f"{file}:{node.lineno}: {path}"
                elif node.attr not in known and not node.attr.startswith("__"):
                    yield f"{file}:{node.lineno}: {node.attr}"
            elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+(:[\w.]+)?", str(node.value)):
                words = re.findall(r"\w+", node.value)
                if not set(words) <= known | LISTED | {"_foreach_"} and not documented(node.value.replace(":", ".")):
                    yield f"{file}:{node.lineno}: {node.value!r}"


def test_every_name_that_torch_does_not_document_is_listed():
    known = known_words() | set(own_names()) | LISTED | OTHERS
    assert list(unlisted(trees(), known)) == []
    sample = """
import torch
from torch.nn import functional as F, _reduction
torch._C._new(torch.optim.Optimizer.profile_hook_step, F.linear, torch.cuda.is_available())
tracer.add_some_hook(x.shape, x._surely_new)
name = 'torch.nn._surely_named'
"""
    found = [each.rpartition(" ")[2] for each in unlisted({"sample.py": ast.parse(sample)}, known)]
    said = """'torch.nn._surely_named' _surely_new add_some_hook torch._C torch.nn._reduction
    torch.optim.Optimizer.profile_hook_step"""
    assert sorted(found) == said.split()


def test_every_listed_name_is_used():
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    last = {re.split(r"\W+", name)[-1].removeprefix("_foreach_"): name for f in FEATURES for name in f.names}
    counts = collections.Counter(re.findall(r"\w+", source))
    assert [name for word, name in last.items() if counts[word] < 2] == []  # once in the list


def test_the_table_of_features(capsys):
    assert main(["explain", "--torch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"torch {torch.__version__}"
    titles = [line[5:].partition(": torch ")[0] for line in lines[1:] if line[0] == "o"]
    assert titles == [feature.title for feature in FEATURES]
    feature = Feature("sums", "they are slow", Name("torch._C._no_such_function", "adds"))
    FEATURES.append(feature)
    try:
        assert main(["explain", "--torch"]) == 1
    finally:
        FEATURES.remove(feature)
    assert capsys.readouterr().out.splitlines()[-1] == f"off  {feature.sentence()}"


def test_names_are_asked_for_by_their_path():
    assert private("torch._foreach_add_") is torch._foreach_add_
    assert not lacks("torch.matmul") and not lacks("torch._foreach_add_")
