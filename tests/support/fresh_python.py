"""Runs a module of checks in an interpreter of its own: Triton reads its variables when it is imported."""

import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run(module, **environment):
    """Return what the module prints as its last line, JSON."""
    command = [sys.executable, "-m", module]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def print_checks(names, around):
    """Call each `check_` function among `names` within ``around(name)``, and print what it raised, as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of NaN and inf
    results = {}
    for name, check in list(names.items()):
        if name.startswith("check_"):
            try:
                with around(name):
                    torch.manual_seed(0)
                    check()
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
    print(json.dumps(results))
