"""Runs a module of checks in an interpreter of its own: Triton reads its variables when it is imported."""

import ast
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(module, *arguments, **environment):
    """Return what the module prints as its last line, JSON."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def checks_of(path, slow):
    """Return the `check_` functions of a file that is not imported here, as parameters of a test."""
    functions = [each for each in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(each, ast.FunctionDef)]
    names = [each.name for each in functions if each.name.startswith("check_") and not each.args.args]
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def asked_for(request):
    """Return the checks of those tests of this file that run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return [item.callspec.params["check"] for item in items if "check" in item.callspec.params]


def print_checks(names, around):
    """Call each function among `names` that the command line names, within ``around(name)``.

    What each raised is printed, as JSON.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of NaN and inf
    results = {}
    for name in sys.argv[1:]:
        try:
            with around(name):
                torch.manual_seed(0)
                names[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
