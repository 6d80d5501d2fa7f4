"""Wrong input, and what is said of it: `data/wrong_input.txt` has files, who reads them, and each error as a whole."""

import itertools
import re
import shlex
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn, optim

import hmpx
from hmpx.insight.check import check_files
from hmpx.recipes.reading import read_recipe
from hmpx.shell.main import main

STORED = Path(__file__).parents[1] / "data" / "wrong_input.txt"


def error_of(read, *given):
    with pytest.raises(hmpx.HmpxError) as error:
        read(*given)
    return str(error.value)


def prepared(recipe):
    """Prepare a model, which the error has to leave as it was."""
    model = nn.Sequential(OrderedDict(lm_head=nn.Linear(4, 4), norm=nn.LayerNorm(4)))
    optimizer = optim.LBFGS(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    held = [(p, p.data.clone(), p.grad) for p in model.parameters()]
    try:
        hmpx.prepare(model, optimizer, recipe)
    finally:
        assert all(p.dtype is torch.float32 and torch.equal(p.data, w) and p.grad is g for p, w, g in held)
        assert not hasattr(optimizer, "_hmpx_attachment") and model(torch.ones(1, 4)).dtype is torch.float32
        assert torch.matmul is torch._C._VariableFunctions.matmul and not hmpx.base.process_state.module_rules


def of_recipe(name):
    """By its path, read before or not, as `explain` says it, and as a dict, which has no line."""
    yield "", (whole := error_of(prepared, name))
    yield "", error_of(lambda: prepared(read_recipe(name)))
    yield "explain: ", str(next(check_files([name]), "nothing"))
    try:
        keys = yaml.safe_load(Path(name).read_text())
    except (yaml.YAMLError, ValueError, FileNotFoundError):  # or the name of no recipe
        return
    if (
        isinstance(keys, dict)
        and all(isinstance(key, str) for key in keys)
        and not re.search("second time|YAML 1.1", whole)
    ):
        yield "dict: ", error_of(prepared, keys)


def of_list(name):
    yield "", error_of(lambda: hmpx.convert(bf16_file_path=name))
    yield "explain: ", str(next(check_files([name]), "nothing"))


READERS = {"recipe": of_recipe, "list": of_list}


def told_by(who, words, capsys):
    """What each reader says; one that says no more than the first, beside a place, is left out."""
    if who not in READERS:
        status, said = main([who, *words]), "".join(capsys.readouterr()).replace(f"{Path.cwd()}/", "")
        assert status == (1 if " checked, " in said else 2), (who, words)  # 1: of files that were read
        return said.splitlines()
    lines, known = [], set()
    for how, said in READERS[who](*words):
        if known.isdisjoint({said, rest := re.sub(r"^\S+: ", "", said)}):
            lines += f"{how}{said}".splitlines()
        known |= {said, rest}
    return lines


def is_answer(line):
    return line.startswith(">")


def test_what_is_said_of_wrong_input(tmp_path, monkeypatch, capsys, request):
    """``== NAME`` begins a file, ``$`` says who reads it, and ``>`` what they say; "..." is what is not ours.

    A command of the shell runs no script then, and converts nothing.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    main_module, argv, linear = sys.modules["__main__"], sys.argv, torch.nn.functional.linear
    stored, found = STORED.read_text(encoding="utf-8").splitlines(), []
    for i, case in enumerate("\n".join(stored).split("\n\n")):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        lines = case.splitlines()
        for n, line in enumerate(lines, 1):
            kind, _, rest = line.partition(" ")
            if kind == ">":
                continue
            found.append(line)
            if kind == "==":
                file = Path(rest)
                file.touch()
            elif kind == "$":
                who, *words = shlex.split(rest)
                known = [each for each in itertools.takewhile(is_answer, lines[n:]) if each.endswith("...")]
                for said in told_by(who, words, capsys):
                    found.append(next((each for each in known if f"> {said}".startswith(each[:-3])), f"> {said}"))
            else:
                file.write_text(f"{file.read_text()}{line}\n", encoding="utf-8")
        assert sys.modules["__main__"] is main_module and sys.argv is argv and torch.nn.functional.linear is linear
        found.append("")
    sys.modules.pop("wrong_setup", None)
    if request.config.getoption("--update"):
        STORED.write_text("\n".join(found), encoding="utf-8")
    assert found[:-1] == STORED.read_text(encoding="utf-8").splitlines(), "run with --update and look at the difference"
