"""Run a function on several ranks: processes on this machine, gloo on the loopback address.

Processes are forked from a server that has imported torch and nothing else that runs, so a test starts them in a tenth
of a second and each of them is as fresh as a process can be.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support import kernels, out_of_sight  # noqa: F401
from tests.support.own_step import is_in_force, own_step

# torch imports its compiler when an optimizer is made: two seconds. Its distributed optimizers compile themselves.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "hmpx",
    "tests.support.ranks",
]
_PATIENCE = 120  # seconds: for the whole of a test on two busy cores


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def run(world: int, function: Callable, *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` on `world` ranks and return what each returns, which must be picklable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, results, function, args, is_in_force()))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            answers = [_answer(results, processes) for _ in processes]
        finally:
            for process in processes:
                process.join(10 if len(multiprocessing.active_children()) else 0)
                process.kill()
    failed = [answer for rank, answer, good in sorted(answers, key=lambda a: a[0]) if not good]
    if failed:
        raise RankFailed("\n".join(failed))
    return [answer for _, answer, _ in sorted(answers, key=lambda a: a[0])]


def _answer(results: Any, processes: list) -> tuple[int, Any, bool]:
    for _ in range(_PATIENCE):
        gone = all(
            process.exitcode for process in processes
        )  # whoever has answered waits for the others, then ends by 0
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if gone:
                break
    raise RankFailed(f"no answer; exit codes {[process.exitcode for process in processes]}")


def _rank(
    rank: int, world: int, folder: str, results: Any, function: Callable, args: tuple, asks_own_step: bool
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    gc.freeze()  # a collection would copy all memory that is shared with the server
    out_of_sight.hide()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each rank its own, as a program that forgot to seed would have
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        with own_step() if asks_own_step else contextlib.nullcontext():
            results.put((rank, function(rank, *args), True))
            dist.barrier()
    except BaseException:
        results.put((rank, f"rank {rank}: {traceback.format_exc()}", False))
    finally:
        results.close()
        results.join_thread()  # the answer is away before gloo's threads end, which now and then abort the process
        dist.destroy_process_group()
