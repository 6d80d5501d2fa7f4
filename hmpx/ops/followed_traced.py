"""Tells whose output a tensor is in code that Dynamo traces, where models have different lists (`ops.followed`).

Dynamo computes the nodes of its graph on fake tensors, which share storages and have nodes of autograd's graph as real
ones do. The forward of a model opens a region in the graph: the fake tensors of the nodes in it are marked as those of
the model. A Python function of torch is one node to Dynamo, and the ops in it meet their wrappers when the graph runs:
such nodes get a region of the model whose output they take. Compiled code has no guard on whose output it is handed:
where an op outside of every model takes one, Python runs the code.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch.fx import Graph, GraphModule, Node

from hmpx.base import process_state as state
from hmpx.base.compiling import ask_once
from hmpx.base.region_state import NODES
from hmpx.base.torch_private import private
from hmpx.ops.followed import lists_of_tensors, mark
from hmpx.ops.policies.scopes import lists_of, scope_inside

_ENTER, _LEAVE = NODES
_HANDED = -1  # in the place of lists: of a tensor that is handed to a graph, and is a model's
_answer = threading.local()


def lists_of_traced(tensors: list[torch.Tensor]) -> int:
    """`lists_of_tensors` where Dynamo traces the call."""
    _at_compile_time(_look)
    return _found()


def _at_compile_time(look: Callable) -> None:
    """Dynamo's own, once it is imported: it calls `look` while it traces."""


def _take_dynamos(_: ModuleType) -> None:
    globals()["_at_compile_time"] = private("torch._dynamo.comptime.comptime")


wrapt.register_post_import_hook(_take_dynamos, "torch._dynamo")


def _look(context: Any) -> None:
    """Look at tensors that Dynamo traces; comptime calls it for a frame that has `tensors`."""
    nodes = [proxy.node for proxy in context.get_local("tensors").as_proxy()]
    if nodes:
        mark_traced(nodes[0].graph)
    _answer.lists = max(_lists_of_nodes(nodes), 0)


def _found() -> int:
    return _answer.lists


ask_once(_found)


def mark_traced(graph: Graph) -> None:
    """Mark the fake tensors of a graph: what regions of models compute, and what is handed to the graph."""
    scopes: list[Any] = []
    inputs = set()
    for node in graph.nodes:
        fake = node.meta.get("example_value")
        if node.target is _ENTER:
            scopes.append(node.args[0])
        elif node.target is _LEAVE:
            scopes.pop()
        elif node.op == "placeholder" and isinstance(fake, torch.Tensor):
            inputs.add(fake.untyped_storage()._cdata)
            real = getattr(node.meta.get("grapharg"), "example", None)
            if isinstance(real, torch.Tensor) and lists_of_tensors([real]):
                mark(fake, _HANDED)
        elif scopes and (lists := lists_of(scopes[-1])):
            mark([each for each in _tensors(fake) if each.untyped_storage()._cdata not in inputs], lists)


def _tensors(fake: Any) -> list[torch.Tensor]:
    return [each for each in (fake if isinstance(fake, list | tuple) else (fake,)) if isinstance(each, torch.Tensor)]


def _lists_of_nodes(nodes: Iterable[Node]) -> int:
    return lists_of_tensors([each for node in nodes for each in _tensors(node.meta.get("example_value"))])


def follow(module: GraphModule) -> Callable[[Callable], Callable]:
    """Put nodes outside of every model into regions, before a graph is compiled; return what marks its outputs."""
    graph = module.graph
    mark_traced(graph)
    depth, inside = 0, 0  # of the regions of the graph itself; the lists of ours
    for node in list(graph.nodes):
        wanted = 0
        if node.op.startswith("call") and not depth and node.target is not _ENTER:
            wanted = _lists_of_nodes(node.all_input_nodes)
            if wanted == _HANDED:
                raise sys.modules["torch._dynamo.exc"].SkipFrame("the output of a model is used outside of it")
        if wanted != inside:
            with graph.inserting_before(node):
                if inside:
                    graph.call_function(_LEAVE)
                if wanted:
                    casting = state.overlays[wanted].policy is not None
                    graph.call_function(_ENTER, (scope_inside(0, wanted), casting, True))
            inside = wanted
        depth += (node.target is _ENTER) - (node.target is _LEAVE)
    module.recompile()
    (output,) = [node for node in graph.nodes if node.op == "output"]
    outputs = output.args[0] if isinstance(output.args[0], list | tuple) else ()
    found = [_lists_of_nodes([node]) if isinstance(node, Node) else 0 for node in outputs]
    return lambda run: _marking(run, found) if max(found, default=0) > 0 else run


def _marking(run: Callable, lists_of_outputs: list[int]) -> Callable:
    def running(*args):
        results = run(*args)
        for lists, result in zip(lists_of_outputs, results, strict=True):
            if lists > 0:
                mark(result, lists)
        return results

    return running
