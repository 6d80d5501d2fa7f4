"""What a report is of: the script, the recipe, the day, the versions and the device, for the head of its page."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time

import torch

from hmpx.base import process_state
from hmpx.ops.computing.kernels import capability
from hmpx.version import __version__


def about() -> dict[str, str]:
    """Return words by what they are about, the script first; without those that nobody knows."""
    found = {
        "script": process_state.run.get("script") or _program(),
        "recipe": process_state.run.get("recipe", ""),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "hmpx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device(),
    }
    return {key: words for key, words in found.items() if words}


def of_files() -> dict[str, str]:
    """Return what is known of a report on files that two runs have left, on this machine or another."""
    return {key: words for key, words in about().items() if key in ("script", "date", "hmpx")}


def device() -> str:
    """Return the name of the GPU if this process uses one, and what the CPU has."""
    own = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    return f"{own}; CPU {capability()}".removeprefix("; ")


def _program() -> str:
    """Return the script that Python runs, with its arguments; "" at a prompt."""
    own = sys.argv[0] if sys.argv else ""
    return shlex.join([os.path.basename(own), *sys.argv[1:]]) if os.path.isfile(own) else ""


def title(command: str, known: dict[str, str]) -> str:
    """Return the title of a page: "hmpx doctor: train.py --lr 0.1, bf16-sr"."""
    named = ", ".join(each for key in ("script", "recipe") if (each := known.get(key)) and each != "none")
    return f"hmpx {command}: {named}" if named else f"hmpx {command}"
