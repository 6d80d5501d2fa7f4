"""The package `bench` of the examples, for tests."""

import sys

from tests.support.fresh_python import ROOT

sys.path.append(str(ROOT / "examples"))

from bench import casts, gpt, gpu, host, measure, models, updates  # noqa: F401
from bench.command import main  # noqa: F401
from bench.measure import Bench, Line, memory  # noqa: F401
