"""What ran in which precision, and why. `import hmpx` does not load this package; the first use of it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hmpx.insight.comparing.comparison import Comparison
    from hmpx.insight.comparing.row import Row
    from hmpx.insight.doctor.diagnosis import Diagnosis, Problem
    from hmpx.insight.recording.log import Log
    from hmpx.insight.tuning.choices import Choice
    from hmpx.insight.tuning.tuned import Tuned

__all__ = [
    "Choice",
    "Comparison",
    "Diagnosis",
    "Log",
    "Problem",
    "Row",
    "Tuned",
]

_FILES = {
    "Choice": "tuning.choices",
    "Comparison": "comparing.comparison",
    "Diagnosis": "doctor.diagnosis",
    "Log": "recording.log",
    "Problem": "doctor.diagnosis",
    "Row": "comparing.row",
    "Tuned": "tuning.tuned",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"hmpx.insight.{_FILES[name]}"), name)
    raise AttributeError(f"module 'hmpx.insight' has no attribute {name!r}")
