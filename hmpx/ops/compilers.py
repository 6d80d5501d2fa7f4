"""torch.compile and TorchScript under a conversion.

Dynamo recognises torch's functions by identity, in tables that it builds from torch's attributes. The tables must keep
holding the originals: then a wrapper is an ordinary Python function to Dynamo, which it traces through, casts and
conditions included, and the original inside of it is the op. A wrapper that stood in the tables would be taken for an
opaque op, and later changes of what it depends on would be ignored.

TorchScript compiles the original of a wrapper, and so does not cast: `torch.jit.script` knows torch's builtins by
identity and reads the source of everything else, and a wrapper is neither. torch scripts for itself too, when
`torch.func.jvp` is used for the first time.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.compiler import config

from hmpx.base import region_state, run_in_region
from hmpx.base.changes import Attribute, Changes, Item
from hmpx.base.compiling import when_imported
from hmpx.base.torch_private import COMPILED, SCRIPT, private
from hmpx.ops.forwards import unwrapped
from hmpx.ops.policies.policy import Rule
from hmpx.ops.wrapping.callers import rule_of

_BUILTINS = private("torch.jit._builtins._get_builtin_table")()  # of torch's own functions, while they are in place
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)  # of torch.Tensor, written in C
_TABLES = "torch._dynamo.trace_rules"
_RECURSIVE = "torch.jit._recursive"
_NEWER_TABLES = tuple(  # that Dynamo builds from attributes of torch; older versions do not have them
    f"torch._dynamo.variables.torch.{name}"
    for name in ("get_overridable_functions", "TorchInGraphFunctionVariable._get_handlers")
)


class Compilers:
    """Lets Dynamo, as soon as it is imported, and TorchScript see through wrappers.

    When it is undone, compiled code is compiled anew. Wrappers are held by identity only: one that is held here would
    look as if somebody had taken it (`Rebinding.expect`).

    everywhere: whether every op is cast, and not the model's alone, as which a compiled graph counts.
    """

    def __init__(self, everywhere: bool) -> None:
        self._everywhere = everywhere
        self._originals: dict[int, Callable] = {}  # by identity of the wrapper, while it is applied
        self._codes: set[types.CodeType] = set()  # of the wrappers
        self._tags: list[str] = []

    def apply(self, changes: Changes) -> None:
        """Begin, until `changes` are undone."""
        self._changes = changes
        changes.callback(self._end)
        when_imported("torch._dynamo", self._exchange, changes)
        for name in ("try_compile_fn", "make_stub") if SCRIPT.is_on() else ():
            seeing = self._seeing(private(f"{_RECURSIVE}.{name}"))
            changes.put(Attribute(sys.modules[_RECURSIVE], name, f"{_RECURSIVE}.{name}"), seeing)

    def _end(self) -> None:
        config.cache_key_tag = self._untagged()
        self._originals.clear()

    def add(self, originals: Mapping[Callable, Callable], what: str, changes: Changes) -> None:
        """Note wrappers. Code that is compiled already uses none of them and stays valid.

        Args:
            originals: by wrapper.
            what: says in full what all wrappers do, for torch's cache on disk, where a graph stands under the names of
                its ops: else a graph could get the casts of another program.
        """
        self._originals.update({id(wrapper): original for wrapper, original in originals.items()})
        self._tag_with(what)
        codes = {wrapper.__code__ for wrapper in originals if isinstance(wrapper, types.FunctionType)}
        # `torch.compile(flex_attention)` is given the wrapper of an op that is a Python function, and compiles that.
        in_python = [wrapper for wrapper, original in originals.items() if isinstance(original, types.FunctionType)]
        codes -= {wrapper.__code__ for wrapper in in_python if rule_of(wrapper.__code__) is not None}
        self._codes |= codes
        if _TABLES in sys.modules:
            _skip(codes)
        for wrapper, original in originals.items():
            if id(original) in _BUILTINS:
                changes.put(Item(_BUILTINS, id(wrapper), "TorchScript's table of builtins"), _BUILTINS[id(original)])

    def _tag_with(self, what: str) -> None:
        tag = f"hmpx {hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}"
        config.cache_key_tag = f"{self._untagged()}{tag}"
        self._tags.append(tag)

    def _untagged(self) -> str:
        """Return the tag without our part; a user may have added to it, and each asyncio task has its own."""
        found = config.cache_key_tag
        for tag in self._tags:
            found = found.replace(tag, "")
        return found

    def _exchange(self, dynamo: ModuleType) -> None:
        """Keep torch's own functions in Dynamo's tables."""
        if not COMPILED.is_on():
            stance = torch.compiler.set_stance("force_eager")
            self._changes.callback(stance.__exit__, None, None, None)
            stance.__enter__()
            return
        tables = dynamo.trace_rules
        load_object, get_tensor_method, originals = tables.load_object, tables.get_tensor_method, self._originals

        def load_original(name: str) -> Any:
            value = load_object(name)
            return originals.get(id(value), value)

        @functools.cache
        def get_original_methods() -> frozenset:
            return get_tensor_method() | frozenset(v for v in originals.values() if isinstance(v, _METHODS))

        def clear_tables() -> None:
            newer = filter(None, map(private, _NEWER_TABLES))
            for table in (tables.get_torch_obj_rule_map, tables.get_tensor_method, get_tensor_method, *newer):
                table.cache_clear()

        self._changes.callback(forget_compiled)
        self._changes.callback(clear_tables)
        self._changes.put(Attribute(tables, "load_object", f"{_TABLES}.load_object"), load_original)
        self._changes.put(Attribute(tables, "get_tensor_method", f"{_TABLES}.get_tensor_method"), get_original_methods)
        _skip(self._codes)
        self._watch_graphs(dynamo.output_graph)
        clear_tables()

    def _watch_graphs(self, output_graph: ModuleType) -> None:
        """Wrap graphs that contain regions, so that the regions take effect when they run; or all, as forwards."""
        compile_graph = output_graph.OutputGraph.call_user_compiler

        def call_user_compiler(output: Any, module: Any, inputs: Any) -> Callable:
            _guard_on_region(output)
            opens = any([_opens_regions(each) for each in module.modules()])  # before a backend changes it
            wrap = functools.partial(run_in_region.graph, opens=opens, everywhere=self._everywhere)
            return wrap(wrap(compile_graph)(output, module, inputs))

        label = "torch._dynamo.output_graph.OutputGraph.call_user_compiler"
        self._changes.put(Attribute(output_graph.OutputGraph, "call_user_compiler", label), call_user_compiler)

    def _seeing(self, compile_function: Callable) -> Callable:
        """Wrap a TorchScript function that takes a function first, so that it gets the original of a wrapper."""
        return lambda function, *rest: compile_function(self._own(function), *rest)

    def _own(self, function: Any) -> Any:
        """Return the function that torch or the user wrote; of a bound method, bound again."""
        function = unwrapped(function)
        original = self._originals.get(id(getattr(function, "__func__", function)))
        if original is None:
            return function
        return types.MethodType(original, function.__self__) if isinstance(function, types.MethodType) else original


def _skip(codes: Iterable[types.CodeType]) -> None:
    """Never compile a wrapper by itself after a graph break: it is like the C function that it stands for."""
    for code in codes if COMPILED.is_on() else ():
        if rule_of(code) is not Rule.INSIDE:  # which is left with what it calls
            private("torch._dynamo.eval_frame.skip_code")(code)


def _guard_on_region(output: Any) -> None:
    """Guard a graph by the region around it. Operators (`x @ y`) are nodes that Dynamo takes from no wrapper."""
    source, guards = sys.modules["torch._dynamo.source"], sys.modules["torch._dynamo.guards"]
    module = output.root_tx.import_source(region_state.__name__)
    region = source.AttrSource(source.AttrSource(module, "nowhere"), "here")
    for name in ("casting", "scope", "closed", "island"):
        output.guards.add(source.AttrSource(region, name).make_guard(guards.GuardBuilder.EQUALS_MATCH))


def _opens_regions(module: Any) -> bool:
    found = [node.target for node in module.graph.nodes] if hasattr(module, "graph") else []
    entered, left = map(found.count, region_state.NODES)
    if entered != left:  # one that is opened or closed by hand, which holds before or after the graph: Python runs it
        raise sys.modules["torch._dynamo.exc"].SkipFrame("a region of hmpx is opened here and closed elsewhere")
    return entered > 0


def forget_compiled() -> None:
    """Let torch compile everything anew."""
    if _TABLES in sys.modules:
        torch.compiler.reset()


def trace_anew() -> None:
    """Restart Dynamo's trace if one is running: wrappers were put in place, so it may have seen originals."""
    if _TABLES in sys.modules and COMPILED.is_on() and private("torch._guards.CompileContext.try_get")() is not None:
        raise sys.modules["torch._dynamo.exc"].UnspecializeRestartAnalysis(restart_reason="wrappers of hmpx")
