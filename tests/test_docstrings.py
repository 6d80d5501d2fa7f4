"""Each public docstring has an example, which runs; results document their fields."""

from __future__ import annotations

import doctest
import enum
import re
import types

import pytest
import torch

import hmpx

HANDLES = (
    *(hmpx.Conversion, hmpx.Attachment, hmpx.Activation, hmpx.Log, hmpx.Comparison),
    *(hmpx.Row, hmpx.Tuned, hmpx.Choice, hmpx.ModuleRule, hmpx.Diagnosis, hmpx.Finding),
    *(hmpx.Rule, hmpx.Recipe, hmpx.Policy),
)
FLAGS = doctest.ELLIPSIS
PARSER = doctest.DocTestParser()


def documented():
    """What `hmpx.__all__` names, the functions of `hmp`, and every method with an example."""
    things = {name: getattr(hmpx, name) for name in hmpx.__all__}
    things |= {f"hmp.{name}": getattr(hmpx.hmp, name) for name in hmpx.hmp.__all__}
    for handle in HANDLES:
        methods = {name: getattr(handle, name) for name in dir(handle) if not name.startswith("_")}
        methods = {name: each for name, each in methods.items() if PARSER.get_examples(each.__doc__ or "")}
        if not issubclass(handle, enum.Enum):
            things |= {f"{handle.__name__}.{name}": each for name, each in methods.items()}
    return things


@pytest.mark.parametrize("name", documented())
def test_the_example_of_a_public_docstring_runs(name, tmp_path, monkeypatch, caplog):
    """With what a training script has in hand: `torch`, `hmpx`, a model, its optimizer, and inputs."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    world = {"torch": torch, "hmpx": hmpx, "model": model, "optimizer": optimizer, "inputs": torch.ones(2, 4)}
    thing = documented()[name]
    test = PARSER.get_doctest(thing.__doc__, world, name, getattr(thing, "__module__", name), 0)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
    hmpx.restore()


def test_results_document_their_fields():
    """Each as "name: what it is", or with others as "name, other: what they are"."""
    for handle in HANDLES:
        own = {name for name in getattr(handle, "__dataclass_fields__", ()) if not name.startswith("_")}
        said = re.findall(r"(?:^ *|(?<=\. ))(\w+(?:, \w+)*): ", handle.__doc__, re.MULTILINE)
        missing = own.difference(*(names.split(", ") for names in said))
        assert not missing, f"{handle.__name__} says nothing of {sorted(missing)}"


def test_every_public_name_is_looked_at():
    classes = {each for name in hmpx.__all__ if isinstance(each := getattr(hmpx, name), type)}
    errors = {each for each in classes if issubclass(each, Exception)}
    regions = {hmpx.disable_casts, hmpx.enable_casts, hmpx.casts, hmpx.cached_weights}
    assert classes - errors - regions <= set(HANDLES)
    functions = [name for name in hmpx.__all__ if isinstance(getattr(hmpx, name), types.FunctionType)]
    assert "convert" in functions and set(functions) <= set(documented())
