"""Runs a module of `tests.support` in an interpreter of its own; Triton reads its variables when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(module, **environment):
    """Return what the module prints as its last line, JSON."""
    command = [sys.executable, "-m", module]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
