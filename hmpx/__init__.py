"""Mixed precision that you can read, edit and undo."""

import os as _os
import typing as _typing
from importlib import import_module as _import_module

from hmpx import hmp
from hmpx.conversion import convert, restore
from hmpx.errors import HmpxError
from hmpx.ops.module_rules import policies_of, policy_for
from hmpx.ops.policies.policy import Policy
from hmpx.ops.user_functions import bf16, fp16, fp32, promote
from hmpx.regions import cached_weights, casts, disable_casts, enable_casts
from hmpx.rounding.stochastic import stochastic_round, stochastic_round_
from hmpx.updates.attach import attach, detach
from hmpx.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from hmpx.conversion import Conversion as Conversion
    from hmpx.errors import OpListError as OpListError
    from hmpx.errors import OptLevelError as OptLevelError
    from hmpx.errors import UnknownOpError as UnknownOpError
    from hmpx.insight.doctor import Diagnosis as Diagnosis
    from hmpx.insight.doctor import doctor
    from hmpx.insight.explain import explain
    from hmpx.insight.finding import Finding as Finding
    from hmpx.insight.recording.log import Log as Log
    from hmpx.insight.recording.record import record
    from hmpx.insight.trials.compare import compare
    from hmpx.insight.trials.comparison import Comparison as Comparison
    from hmpx.insight.trials.comparison import Row as Row
    from hmpx.insight.trials.tune import tune
    from hmpx.insight.trials.tuned import Choice as Choice
    from hmpx.insight.trials.tuned import Tuned as Tuned
    from hmpx.ops.module_rules import ModuleRule as ModuleRule
    from hmpx.ops.policies.policy import Rule as Rule
    from hmpx.recipes.activate import Activation as Activation
    from hmpx.recipes.activate import activate
    from hmpx.recipes.prepare import prepare
    from hmpx.recipes.recipe import Recipe
    from hmpx.updates.attach import Attachment as Attachment

__all__ = [
    "HmpxError",
    "Policy",
    "Recipe",
    "activate",
    "attach",
    "bf16",
    "cached_weights",
    "casts",
    "compare",
    "convert",
    "detach",
    "disable_casts",
    "doctor",
    "enable_casts",
    "explain",
    "fp16",
    "fp32",
    "hmp",
    "policies_of",
    "policy_for",
    "prepare",
    "promote",
    "record",
    "restore",
    "stochastic_round",
    "stochastic_round_",
    "tune",
]

# Loaded when they are asked for: recipes; what explains and searches, since a run needs none of it; and the classes of
# what functions give back, for annotations and `isinstance`.
_LATER = {
    "Recipe": "hmpx.recipes.recipe",
    "activate": "hmpx.recipes.activate",
    "prepare": "hmpx.recipes.prepare",
    "compare": "hmpx.insight.trials.compare",
    "doctor": "hmpx.insight.doctor",
    "explain": "hmpx.insight.explain",
    "record": "hmpx.insight.recording.record",
    "tune": "hmpx.insight.trials.tune",
    "Activation": "hmpx.recipes.activate",
    "Attachment": "hmpx.updates.attach",
    "Conversion": "hmpx.conversion",
    "ModuleRule": "hmpx.ops.module_rules",
    "OpListError": "hmpx.errors",
    "OptLevelError": "hmpx.errors",
    "Rule": "hmpx.ops.policies.policy",
    "UnknownOpError": "hmpx.errors",
    "Choice": "hmpx.insight.trials.tuned",
    "Comparison": "hmpx.insight.trials.comparison",
    "Diagnosis": "hmpx.insight.doctor",
    "Log": "hmpx.insight.recording.log",
    "Finding": "hmpx.insight.finding",
    "Row": "hmpx.insight.trials.comparison",
    "Tuned": "hmpx.insight.trials.tuned",
}


_GONE = {"audit": "write `with hmpx.record() as log: model(inputs)`, and read log.escaped"}


def __getattr__(name: str) -> _typing.Any:
    if name in _GONE:
        raise AttributeError(f"hmpx.{name} is gone: {_GONE[name]}")
    if name not in _LATER:
        raise AttributeError(f"module 'hmpx' has no attribute {name!r}")
    return getattr(_import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _os.environ.get("HMPX_RECIPE"):
    _import_module("hmpx.recipes.activate").activate_from_environment()
