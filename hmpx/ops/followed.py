"""Tells which model's forward has made a tensor, where models have different lists.

The outputs of a model carry the number of its lists in two places: in their storage, which views and detached tensors
share, and in their node of autograd's graph, which all later results lead back to. A parameter belongs to its model.

Dynamo computes the nodes of its graph on fake tensors, which share storages and have nodes of autograd's graph as real
ones do. The forward of a model opens a region in the graph. The fake tensors of the nodes in it are marked as the
model's. A Python function of torch is one node to Dynamo, and its ops meet their wrappers only when the graph runs. So
a node outside of every model gets a region of the model whose output it takes. Compiled code has no guard on which
model made its arguments: where an op outside of every model takes such an argument, Python runs the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch.fx import Graph, GraphModule, Node

from hmpx.base import process_state as state
from hmpx.base.compiling import ask_once
from hmpx.base.region_state import NODES
from hmpx.base.torch_private import private
from hmpx.ops.policies.scopes import lists_of, scope_inside

Tensor = torch.Tensor
_KEY = "_hmpx_lists"
_FAR = 1000  # the search through autograd's graph ends after so many nodes
_storage_of = Tensor.untyped_storage
_ENTER, _LEAVE = NODES
_HANDED = -1  # stands for the lists of a tensor that is a model's, and an argument of the graph
_answer = threading.local()


def mark(value: Any, lists: int) -> None:
    """Note that the tensors in a value are the output of the model with these lists."""
    for tensor in _tensors_in(value):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_KEY, tensor.output_nr] = lists
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no storage
            setattr(_storage_of(tensor), _KEY, lists)


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if isinstance(value, dict):
            inside: Iterable = value.values()
        elif isinstance(value, (list, tuple)):
            inside = value
        elif dataclasses.is_dataclass(value) or isinstance(value, torch.distributions.Distribution):
            inside = vars(value).values()
        else:
            return
        for each in inside:
            yield from _tensors_in(each, depth - 1)


def lists_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Return the lists of the one model whose output these tensors are; 0 if there is none, or several.

    If some require a gradient, only these decide: a student's output beside its teacher's.
    """
    found: tuple[set[int], set[int]] = set(), set()  # by whether the tensor requires a gradient
    for tensor in tensors:
        found[tensor.requires_grad].update(lists_of_tensor(tensor))
    return _only(found[True] or found[False])


def lists_of_node(node: Any) -> int:
    """Return the lists of the one model from whose outputs a node of autograd's graph was computed."""
    return _only(set(_lists_behind([(node, 0)])))


def _only(found: set[int]) -> int:
    return found.pop() if len(found) == 1 else 0


def lists_of_tensor(tensor: Tensor) -> Iterable[int]:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        if lists := getattr(_storage_of(tensor), _KEY, 0):
            return (lists,)
    if isinstance(tensor, torch.nn.Parameter):
        return filter(None, (state.lists_of_parameters.get(tensor, 0),))
    return _lists_behind([(tensor.grad_fn, tensor.output_nr)])


def _lists_behind(waiting: list[tuple[Any, int]]) -> Iterator[int]:
    """Walk autograd's graph back from some nodes; yield the lists of the models whose outputs come first."""
    seen: set[tuple[Any, int]] = set()
    while waiting and len(seen) < _FAR:
        node, number = place = waiting.pop()
        if node is None or place in seen:
            continue
        seen.add(place)
        leaf = getattr(node, "variable", None)
        lists = node.metadata.get((_KEY, number), 0) if leaf is None else state.lists_of_parameters.get(leaf, 0)
        if lists:
            yield lists
        else:
            waiting.extend(node.next_functions)


# In code that Dynamo traces


def lists_of_traced(tensors: list[Tensor]) -> int:
    """`lists_of_tensors` where Dynamo traces the call."""
    _at_compile_time(_look)
    return _found()


def _at_compile_time(look: Callable) -> None:
    """Stand in for Dynamo's `comptime`, which calls `look` while Dynamo traces, until Dynamo is imported."""


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
    """Mark the fake tensors that regions of models compute in a graph, and its arguments that are a model's."""
    scopes: list[Any] = []
    inputs = set()
    for node in graph.nodes:
        fake = node.meta.get("example_value")
        if node.target is _ENTER:
            scopes.append(node.args[0])
        elif node.target is _LEAVE:
            scopes.pop()
        elif node.op == "placeholder" and isinstance(fake, Tensor):
            inputs.add(fake.untyped_storage()._cdata)
            real = getattr(node.meta.get("grapharg"), "example", None)
            if isinstance(real, Tensor) and lists_of_tensors([real]):
                mark(fake, _HANDED)
        elif scopes and (lists := lists_of(scopes[-1])):
            mark([each for each in _tensors(fake) if each.untyped_storage()._cdata not in inputs], lists)


def _tensors(fake: Any) -> list[Tensor]:
    return [each for each in (fake if isinstance(fake, list | tuple) else (fake,)) if isinstance(each, Tensor)]


def _lists_of_nodes(nodes: Iterable[Node]) -> int:
    return lists_of_tensors([each for node in nodes for each in _tensors(node.meta.get("example_value"))])


def follow(module: GraphModule) -> Callable[[Callable], Callable]:
    """Put nodes outside of every model into regions before a graph is compiled; return a wrapper that marks outputs."""
    graph = module.graph
    mark_traced(graph)
    depth, inside = 0, 0  # how many regions of the graph are open; the lists of the one that is added here
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
