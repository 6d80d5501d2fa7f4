"""Start Python programs as `subprocess` does, from a process that has imported torch already.

To import torch and its compiler takes a program 4 seconds; a fork of a process that has both takes a few milliseconds.
What is forked is as a fresh interpreter would be: nothing but torch is imported, hmpx is not, and arguments,
environment, folder, standard streams and exit status are the program's own. Only ``python -m hmpx``, which would take a
second to load its commands and to write its first wrappers, finds both done, and looks through no more than a test does
(`out_of_sight`). What an interpreter reads when it starts, its flags and variables such as `OMP_NUM_THREADS` and
`ATEN_CPU_CAPABILITY`, is read no more: a test of these starts `sys.executable` itself, and so do some of the others,
one for each way to start.

`run` calls a program. `folder()` is one for `PATH` with a `python` and a `torchrun` for the commands of a shell.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOCKET = "HMPX_TESTS_PYTHON"  # the variable by which a `python` of the shell finds the server
_status_at_end: int | None = None  # of a program, unless a signal ends it
WITH_HMPX = "-hmpx"  # what the address of the second server, which has hmpx imported, ends with
IMPORTED = ("torch", "torch._dynamo", "torch.utils.cpp_extension")


def run(
    *arguments: object, cwd: object = None, env: dict | None = None, check: bool = False
) -> subprocess.CompletedProcess:
    """`subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`, without the wait for torch."""
    command = [sys.executable, *map(str, arguments)]
    folder, environment = str(cwd or os.getcwd()), dict(os.environ if env is None else env)
    with open(os.devnull) as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = _call(server(), command[1:], folder, environment, (nothing.fileno(), out.fileno(), err.fileno()))
        for stream in (out, err):
            stream.seek(0)
        done = subprocess.CompletedProcess(command, status, out.read().decode(), err.read().decode())
    assert not check or done.returncode == 0, done.stderr
    return done


def folder() -> str:
    """One with a `python` that asks the server, and a `torchrun` whose ranks do; for the front of `PATH`."""
    return str(Path(server()).parent)


def environment() -> dict[str, str]:
    """In which `python` and `torchrun` are these, and hmpx is this checkout."""
    paths = {"PATH": folder(), "PYTHONPATH": str(ROOT)}
    paths = {key: os.pathsep.join(filter(None, (path, os.environ.get(key)))) for key, path in paths.items()}
    return {**os.environ, **paths, SOCKET: server(), "PYTHON_EXEC": f"{folder()}/python"}  # which torchrun reads


@functools.cache
def server() -> str:
    """The address of the server: of pytest's, where workers share it, or of one of this process's own."""
    address = os.environ.get(SOCKET) or start()
    for _ in range(6000):
        if os.path.exists(address):
            return address
        time.sleep(0.02)
    raise TimeoutError(f"{address}: nobody listens")


def start() -> str:
    """Start a server, which ends with this process, and return the address at which it will listen."""
    place = tempfile.mkdtemp(prefix="hmpx-python-")
    address = f"{place}/socket"
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        script = Path(place, name)
        command = shlex.join([sys.executable, "-SE", __file__, sys.executable, *module.split()])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    command = [sys.executable, "-c", "from tests.support import python; python.serve()"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, SOCKET: address}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    atexit.register(_end, process, place, os.getpid())
    return address


def _end(process: subprocess.Popen, place: str, starter: int) -> None:
    if os.getpid() == starter:  # and no fork of it, which may end in any way
        process.kill()
        shutil.rmtree(place, ignore_errors=True)


def _call(address: str, arguments: list[str], cwd: str, env: dict, fds: tuple[int, ...]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address + WITH_HMPX * (arguments[:2] == ["-m", "hmpx"]))
        socket.send_fds(connection, [json.dumps([arguments, cwd, env]).encode() + b"\n"], list(fds))
        return int(connection.makefile().readline())


# In the server


def serve() -> None:
    """Listen, and fork for each request; only what is forked returns from here, as the program that was asked for."""
    atexit.register(_leave)  # before all others, so it is called after them
    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    address = os.environ.pop(SOCKET)
    for each, end in zip(listening, ("-torch", WITH_HMPX), strict=True):
        each.bind(address + end)
        each.listen(64)
    os.rename(f"{address}-torch", address)  # so whoever finds it is heard
    connection = _forked(listening)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not received.endswith(b"\n"):
        received += connection.recv(1 << 20)
    if pid := os.fork():
        connection.sendall(b"%d\n" % _status(pid, connection))
        os._exit(0)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    _become(*json.loads(received))


def _forked(listening: list[socket.socket]) -> socket.socket:
    """Return, in a fork, the connection of a request. The first for hmpx makes the server that has it imported."""
    gc.freeze()  # no program looks through what all of them share, which would copy that memory for each
    starter = os.getppid()
    while True:
        ready = select.select(listening, [], [], 2)[0]
        if not ready and os.getppid() != starter:  # it was killed
            os._exit(0)
        if listening[1:] and listening[1] in ready:
            if not os.fork():
                listening.pop(0).close()
                _import_hmpx()
                return _forked(listening)
            listening.pop().close()
        elif ready:
            connection, _ = listening[0].accept()
            if not os.fork():
                for each in listening:
                    each.close()
                return connection
            connection.close()


def _import_hmpx() -> None:
    """Load every command, and write the wrappers of casts everywhere and in models."""
    try:
        main = importlib.import_module("hmpx.shell.main")
        for module, _ in main._COMMANDS.values():
            importlib.import_module(f"hmpx.shell.{module}")
        hmpx = importlib.import_module("hmpx")
        hmpx.convert().restore()
        hmpx.activate("bf16-sr").restore()
        importlib.import_module("tests.support.out_of_sight").hide()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _status(pid: int, connection: socket.socket) -> int:
    """Of a program when it ends; it is killed if whoever asked for it is gone."""
    ended = os.pidfd_open(pid)
    if connection in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run what `python *arguments` runs; to return or to raise ends the interpreter as it ends any other."""
    global _status_at_end
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.orig_argv = arguments, [sys.executable, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        if arguments[0] == "-m":
            sys.path[0] = cwd
            sys.argv = arguments[1:]
            runpy._run_module_as_main(arguments[1])
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), vars(main))
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
            main.__file__ = os.path.abspath(arguments[0])
            with open(main.__file__, "rb") as source:
                code = compile(source.read(), main.__file__, "exec")
            exec(code, vars(main))
        _status_at_end = 0
    except SystemExit as error:
        _status_at_end = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        raise
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)  # type: ignore[union-attr]
        _status_at_end = 1
        sys.exit(1)


def _leave() -> None:
    """End here when all threads and functions for `atexit` are done.

    To take everything apart that torch is made of, an interpreter copies the memory that it shares with the server, and
    that takes half a second.
    """
    status = _status_at_end
    for each in (*gc.get_objects(), sys.stdout, sys.__stdout__):
        if issubclass(type(each), io.IOBase.__base__) and not each.closed:  # no class is asked by its metaclass
            try:
                each.flush()  # as when the interpreter closes it
            except (OSError, ValueError):
                status = 120 if each is sys.stdout else status
    if status is not None:
        os._exit(status)


# As the `python` of a shell


def ask() -> None:
    """Hand the program over to the server; what that cannot do, a real interpreter does."""
    executable, arguments = sys.argv[1], sys.argv[2:]
    if arguments[:1] == ["-u"]:  # torchrun's: what is written is read at the end
        arguments = arguments[1:]
    first = arguments[0] if arguments else "-"
    if "--multiprocessing-fork" in arguments or (first.startswith("-") and first not in ("-m", "-c")):
        os.execv(executable, [executable, *arguments])
    status = _call(os.environ[SOCKET], arguments, os.getcwd(), dict(os.environ), (0, 1, 2))
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    ask()
