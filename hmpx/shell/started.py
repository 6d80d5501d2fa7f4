"""Processes that a script starts, which a record of the script does not see."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any


@contextlib.contextmanager
def started_processes() -> Iterator[Counter[str]]:
    """Count those of Python that are started inside: of `multiprocessing` by their function, others by command."""
    found: Counter[str] = Counter()
    start, inside = BaseProcess.start, True

    def counted(process: BaseProcess) -> None:
        found[str(getattr(getattr(process, "_target", None), "__name__", type(process).__name__))] += 1
        start(process)

    def heard(event: str, values: tuple[Any, ...]) -> None:
        # The hook stays, as audit hooks do, until this process ends.
        if inside and event == "subprocess.Popen" and _is_python(values[0]):
            found[os.path.basename(os.fsdecode(values[0]))] += 1

    sys.addaudithook(heard)
    BaseProcess.start = counted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        BaseProcess.start, inside = start, False  # type: ignore[method-assign]


def _is_python(command: Any) -> bool:
    name = os.path.basename(os.fsdecode(command)) if isinstance(command, str | bytes | os.PathLike) else ""
    return name.startswith(("python", "torchrun", "accelerate")) or command == sys.executable
