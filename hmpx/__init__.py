"""Mixed precision that you can read, edit and undo."""

from hmpx import activation, hmp
from hmpx.activation import Activation, activate
from hmpx.auditing import Audit, Finding, audit
from hmpx.conversion import Conversion, convert, restore
from hmpx.errors import HmpxError, OpListError, OptLevelError, UnknownOpError
from hmpx.functions import bf16, fp16, fp32, promote
from hmpx.policy import Policy, Rule
from hmpx.preparing import prepare
from hmpx.recipe import Recipe
from hmpx.regions import cached_weights, disable_casts, enable_casts
from hmpx.rounding import stochastic_round, stochastic_round_
from hmpx.updates.attachment import Attachment, attach, detach
from hmpx.words import explain

__version__ = "0.1.0"
__all__ = [
    "Activation",
    "Attachment",
    "Audit",
    "Conversion",
    "Finding",
    "HmpxError",
    "OpListError",
    "OptLevelError",
    "Policy",
    "Recipe",
    "Rule",
    "UnknownOpError",
    "activate",
    "attach",
    "audit",
    "bf16",
    "cached_weights",
    "convert",
    "detach",
    "disable_casts",
    "enable_casts",
    "explain",
    "fp16",
    "fp32",
    "hmp",
    "prepare",
    "promote",
    "restore",
    "stochastic_round",
    "stochastic_round_",
]

activation.activate_from_environment()
