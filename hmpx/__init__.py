"""Mixed precision that you can read, edit and undo."""

from hmpx import hmp
from hmpx.conversion import Conversion, convert, restore
from hmpx.errors import HmpxError, OpListError, OptLevelError, UnknownOpError
from hmpx.insight.audit import Audit, audit
from hmpx.insight.comparing.compare import compare
from hmpx.insight.comparing.comparison import Comparison
from hmpx.insight.comparing.row import Row
from hmpx.insight.dispatched import Finding
from hmpx.insight.doctor.diagnosis import Diagnosis
from hmpx.insight.doctor.doctor import doctor
from hmpx.insight.doctor.problem import Problem
from hmpx.insight.explain import explain
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.record import record
from hmpx.insight.tuning.choice import Choice
from hmpx.insight.tuning.confirmed import Confirmed
from hmpx.insight.tuning.mark import Mark
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.weights.tune_weights import tune_weights
from hmpx.insight.weights.tuned_weights import TunedWeights, WeightChoice
from hmpx.ops.decorators import bf16, fp16, fp32, promote
from hmpx.ops.module_rules import ModuleRule, policies_of, policy_for
from hmpx.ops.policy import Policy, Rule
from hmpx.recipes.activate import Activation, activate
from hmpx.recipes.activate import activate_from_environment as _activate_from_environment
from hmpx.recipes.prepare import prepare
from hmpx.recipes.recipe import Recipe
from hmpx.regions import cached_weights, casts, disable_casts, enable_casts
from hmpx.rounding.stochastic import stochastic_round, stochastic_round_
from hmpx.updates.attach import Attachment, attach, detach
from hmpx.version import __version__ as __version__

__all__ = [
    "Activation",
    "Attachment",
    "Audit",
    "Choice",
    "Comparison",
    "Confirmed",
    "Conversion",
    "Diagnosis",
    "Finding",
    "HmpxError",
    "Log",
    "Mark",
    "ModuleRule",
    "OpListError",
    "OptLevelError",
    "Policy",
    "Problem",
    "Recipe",
    "Row",
    "Rule",
    "Tuned",
    "TunedWeights",
    "UnknownOpError",
    "WeightChoice",
    "activate",
    "attach",
    "audit",
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
    "tune_weights",
]

_activate_from_environment()
