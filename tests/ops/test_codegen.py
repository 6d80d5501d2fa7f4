"""Written wrappers: their source is what the docstring shows, and the code that runs tells the rule."""

import inspect
import itertools
import linecache
import textwrap

import torch

import hmpx
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.policy import Rule
from hmpx.ops.wrapping import codegen
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patching


def test_the_source_in_the_docstring_is_the_one_that_is_written(lists):
    with hmpx.convert(**lists(bf16="matmul")):
        file = inspect.unwrap(torch.matmul).__code__.co_filename
        written = "".join(linecache.getlines(file))
    assert written.startswith("def make(") and textwrap.indent(written, "    ") in codegen.__doc__


def test_every_argument_of_every_op_arrives_as_it_was_given(lists):
    """Under every rule, by position and by name, with ``out=``, with casts off and with nothing to cast."""
    signatures = {entry.signature: name for name, op in catalog().items() for entry in op.entries}
    tensor, wide, arrived, seen = torch.ones(2), torch.ones(2, dtype=torch.float64), object(), []
    for signature, name in signatures.items():
        if signature.lead is None or signature.statistics:
            continue
        parameters = (*signature.lead, *signature.tail)
        for rule, everywhere in itertools.product((Rule.BF16, Rule.FP32, Rule.FIRST_INPUT), (True, False)):
            make = codegen.make_wrapper(signature, rule, "function", everywhere)
            wrapper = make(*[lambda *args, **kwargs: seen.append((args, kwargs))] * 2, Switch(everywhere))
            for floating, more in itertools.product((tensor, wide), ({}, {"out": arrived})):
                given = [floating if p.tensor else f"the {p.name}" for p in parameters]
                by_name = {p.name: value for p, value in zip(parameters, given, strict=True)}
                for args, kwargs in ((given, more), (given[:1], dict([*by_name.items()][1:], **more))):
                    wrapper(*args, **kwargs)
                    ((args, kwargs),) = seen
                    seen.clear()
                    found = dict(zip(by_name, args, strict=False), **kwargs)
                    for key, value in {**by_name, **more}.items():
                        cast = floating is value is tensor and not more
                        assert cast or found[key] is value, (name, key, rule)
                    assert found.keys() == {*by_name, *more}, (name, rule)


def test_a_patch_says_what_it_does(lists):
    with hmpx.convert(**lists(bf16="linear"), where="model") as handle:
        of_models = {patch.label: (patch.how, patch.rule) for patch in handle.patched}
    assert of_models["torch.nn.Module.__call__"] == (Patching.FORWARD, None)
    with hmpx.convert(**lists(bf16="linear"), dtype_map={torch.float64: torch.float32}) as handle:
        how = {patch.label: (patch.how, patch.rule) for patch in handle.patched}
    assert how["torch._C._nn.linear"] == (Patching.CAST, hmpx.Rule.BF16)
    assert how["torch.nn.init.ones_"] == (Patching.UNCAST, None)
    assert how["torch.nn.RNNBase.check_input"] == (Patching.CHECK, None)
    assert how["torch.Tensor.to"] == (Patching.DTYPE_MAP, None)
    others = {*Patching} - {Patching.CAST, Patching.OBSERVED, Patching.FORWARD}
    assert {kind for kind, rule in how.values() if rule is None} == others
    assert not [label for label, (kind, rule) in how.items() if kind is Patching.CAST and rule is None]
