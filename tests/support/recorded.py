"""What a recording of one call says."""

import hmpx
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.recorded import Site


def escaped(call, *args, **kwargs):
    """The listed ops that no wrapper saw in a call, without the names that other tests' modules have captured."""
    with hmpx.record() as log:
        call(*args, **kwargs)
    return [line for line in log.escaped if " list" in line and " and ran in " in line]


def line(function, offset):
    """The line `offset` beneath the head of a function, as file:line."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


def site(op="linear", **more):
    """A call site of a record with figures of its own."""
    given = {"where": "/home/me/model.py:7", "module": "head", "rule": "bf16", "given": ("float32",)}
    rest = {"seen": ("bfloat16",), "result": ("bfloat16",), "calls": 2, "casts": 4, "bytes_cast": 1200}
    return Site(op, op, **{**given, **rest, "cast_seconds": 0.001, "op_seconds": 0.002, **more})


def log_of(*sites, **more):
    return Log([*sites], **{"policy": "bf16: [linear]\n", "about": {"torch": "2.13.0"}, **more})
