"""The names of Habana's HMP: ``from hmpx import hmp`` for ``from habana_frameworks.torch.hpex import hmp``.

Example:
    >>> from hmpx import hmp
    >>> handle = hmp.convert(opt_level="O1", bf16_file_path="", fp32_file_path="", isVerbose=False)
    >>> model(inputs).sum().backward()
    >>> with hmp.disable_casts():
    ...     optimizer.step()
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

from hmpx import conversion
from hmpx.conversion import Conversion
from hmpx.regions import disable_casts, enable_casts

__all__ = ["convert", "disable_casts", "enable_casts"]

logger = logging.getLogger("hmpx")
_SLIPS = {"01": "O1", "02": "O2"}  # a zero for the letter, as in released plugins that call HMP


def convert(
    opt_level: Literal["O1", "O2", "01", "02"] = "O1",
    bf16_file_path: str | os.PathLike[str] | None = "",
    fp32_file_path: str | os.PathLike[str] | None = "",
    isVerbose: bool = False,
    **keywords: Any,
) -> Conversion:
    """`hmpx.convert`, as lenient as HMP was: what HMP accepted is accepted, with a warning that says how it was read.

    Args:
        opt_level: "O1" or "O2"; "01" and "02" are read as these.
        bf16_file_path, fp32_file_path: op list files; left aside with "O2", which decides by itself.
        isVerbose, keywords: as `hmpx.convert` has them.

    Raises:
        OpListError, UnknownOpError, OptLevelError: as `hmpx.convert`.

    Example:
        >>> from hmpx import hmp
        >>> handle = hmp.convert("02")  # with a zero
        >>> handle.policy.opt_level
        'O2'
    """
    level, lists = lenient(opt_level, bf16_file_path, fp32_file_path)
    return conversion.convert(level, isVerbose=isVerbose, **lists, **keywords)


def lenient(opt_level: Any, bf16_file_path: Any, fp32_file_path: Any) -> tuple[Any, dict[str, Any]]:
    """The opt level and lists that HMP would have used for these arguments; each change gives a warning."""
    level = opt_level  # `hmpx.convert` says what is wrong with another one
    if isinstance(opt_level, str) and opt_level in _SLIPS:
        level = _SLIPS[opt_level]
        logger.warning("hmpx: opt_level %r, with a zero, is read as %r, with the letter O", opt_level, level)
    lists: dict[str, Any] = {"bf16_file_path": bf16_file_path, "fp32_file_path": fp32_file_path}
    if level == "O2":
        aside = [f"{key}={os.fspath(path)!r}" for key, path in lists.items() if path is not None and os.fspath(path)]
        if aside:
            logger.warning("hmpx: opt_level 'O2' decides by itself: %s is ignored", " and ".join(aside))
        lists = {}
    return level, lists
