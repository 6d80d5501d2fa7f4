"""The processes that a script starts: those that go on as it runs, and those in which nothing of this command is.

A script that starts itself again, as ``os.execv(sys.executable, [sys.executable, *sys.argv])`` and Lightning's ranks
do, is started by the words that have started this command. What `multiprocessing` spawns imports
`hmpx.shell.spawned` in the place of the script. Everything else is said.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import shlex
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

SPAWNED = "hmpx.shell.spawned"
_LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))


class Running(NamedTuple):
    """What runs in this process.

    command: the words of this process before the script's own, which start it again; empty where nobody knows them.
    file: the script, "" of a module. modules: names of the module.
    """

    command: Sequence[str] = ()
    file: str = ""
    modules: Sequence[str] = ()
    folder: str = ""


@contextlib.contextmanager
def started_processes(
    running: Running,
    tell: Callable[[str], None] = lambda words: None,
    replaced: Callable[[str], None] = lambda words: None,
) -> Iterator[Counter[str]]:
    """Count the Python processes that a script starts inside, which nobody looks at: by their function or command.

    tell: gets the words of one that runs a file of the user. replaced: is called before another program takes the place
    of this process, with its words; "" where that is this command again.
    """
    found: Counter[str] = Counter()
    here, inside = os.getpid(), True
    start, popen, prepared = BaseProcess.start, subprocess.Popen.__init__, multiprocessing.spawn.get_preparation_data
    execs = os.execv, os.execve

    def counted(process: BaseProcess) -> None:
        target = getattr(process, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith("torch.utils.data."):  # DataLoader's own workers
            found[str(getattr(target, "__name__", type(process).__name__))] += 1
        start(process)

    def opened(process: Any, args: Any, *more: Any, **named: Any) -> None:
        popen(process, _again(running, named.get("executable"), args, named.get("cwd")) or args, *more, **named)

    def execv(path: Any, args: Any) -> None:
        execs[0](path, _again(running, path, args) or args)

    def execve(path: Any, args: Any, env: Any) -> None:
        execs[1](path, _again(running, path, args) or args, env)

    def heard(event: str, values: tuple[Any, ...]) -> None:
        # The hook stays, as audit hooks do, until this process ends.
        if not inside or event not in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
            return
        if event == "os.posix_spawn" and sys._getframe(1).f_globals.get("__name__") == "subprocess":
            return  # of `subprocess.Popen`, which has been heard
        words = _words(values[0] if event == "os.system" else values[1])
        said = shlex.join(words)
        own = "hmpx" in [os.path.basename(word) for word in words[1:4]]  # this command, or another of hmpx
        if event == "os.exec" and os.getpid() == here:
            if os.access(values[0], os.X_OK):  # `execvp` tries folder after folder
                replaced("" if own else said)
        elif not own and _is_python(values[0] if event != "os.system" else words[0]):
            found[os.path.basename(words[0])] += 1
            if any(each.endswith(".py") and os.path.isfile(each) and not _is_of_library(each) for each in words):
                tell(said)

    sys.addaudithook(heard)
    BaseProcess.start = counted  # type: ignore[method-assign, assignment]
    subprocess.Popen.__init__ = opened  # type: ignore[method-assign, assignment]
    os.execv, os.execve = execv, execve  # type: ignore[assignment]
    hand_on()
    try:
        yield found
    finally:
        inside = False
        BaseProcess.start, subprocess.Popen.__init__ = start, popen  # type: ignore[method-assign]
        os.execv, os.execve = execs
        multiprocessing.spawn.get_preparation_data = prepared


def hand_on() -> None:
    """Let processes that `multiprocessing` spawns from this one import `hmpx.shell.spawned` in place of the script."""
    plain = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = plain(name)
        data.pop("init_main_from_path", None)
        return data | {"init_main_from_name": SPAWNED}

    multiprocessing.spawn.get_preparation_data = prepared


def _again(running: Running, program: Any, args: Any, folder: Any = None) -> list[str] | None:
    """Return the words that start this command again, for words that start its script again; None for others.

    It has to be by the same interpreter and in the same folder, where the words of this command mean the same.
    """
    words = _words(args) if isinstance(args, list | tuple) else []
    if not running.command or not words or os.path.realpath(folder or os.getcwd()) != running.folder:
        return None
    path = os.path.abspath(os.fsdecode(program or words[0]))
    if os.path.dirname(path) != os.path.dirname(sys.executable) or not _is_same(path, sys.executable):
        return None
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "-c"):
        i += 2 if words[i] in ("-W", "-X") else 1
    if words[i : i + 1] == ["-m"] and words[i + 1 : i + 2] and words[i + 1] in running.modules:
        own = words[i + 2 :]
    elif running.file and i < len(words) and _is_same(words[i], running.file):
        own = words[i + 1 :]
    else:
        return None
    return [words[0], *running.command[1:], *own]


def _words(args: Any) -> list[str]:
    """Return the words of a command that is a string or a list; what nobody can read is no word."""
    if isinstance(args, str | bytes):
        try:
            return shlex.split(os.fsdecode(args)) or [""]
        except ValueError:
            return [os.fsdecode(args)]
    return [os.fsdecode(each) if isinstance(each, str | bytes | os.PathLike) else "" for each in args] or [""]


def _is_same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _is_of_library(path: str) -> bool:
    return os.path.realpath(path).startswith(_LIBRARIES)


def _is_python(command: Any) -> bool:
    name = os.path.basename(os.fsdecode(command)) if isinstance(command, str | bytes | os.PathLike) else ""
    return name.startswith(("python", "torchrun", "accelerate")) or command == sys.executable
