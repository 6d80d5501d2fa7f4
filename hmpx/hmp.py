"""The names of Habana's HMP: ``from hmpx import hmp`` for ``from habana_frameworks.torch.hpex import hmp``."""

from __future__ import annotations

from hmpx.conversion import convert
from hmpx.regions import disable_casts, enable_casts

__all__ = ["convert", "disable_casts", "enable_casts"]
