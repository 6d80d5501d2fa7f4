"""The libraries that people use, offline and silent."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from tests.downstream.scripts import torchvision_ops  # noqa: F401  timm and others import torchvision
