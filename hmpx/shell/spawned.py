"""The main module of a process that `multiprocessing` spawned from a script under ``python -m hmpx run``."""

from hmpx.shell.run_script import spawned

globals().update(spawned(__name__))
