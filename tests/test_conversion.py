"""convert and restore: what is installed, what comes back, what a failure leaves behind."""

import inspect
import linecache
import logging
import re
import subprocess
import textwrap
import threading
import traceback

import pytest
import torch
import torch.nn.functional as F

import hmpx
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.policy import Case
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import build_choice
from tests.support import python

X = torch.randn(4, 4)
SIN, ADD, EXP = torch.sin, torch.add, torch.exp


def test_restore_puts_back_the_identical_objects(untouched):
    for level in ("O1", "O2"):
        hmpx.convert(level)
        assert (X @ X).dtype is torch.bfloat16
        hmpx.restore()
        assert not untouched.changed() and (X @ X).dtype is torch.float32
    assert torch.Tensor.matmul is torch._C.TensorBase.matmul


def test_restore_of_an_optimizer_undoes_all_that_prepare_did(untouched):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    hmpx.prepare(model, optimizer, "nxd-standard")
    model(X).sum().backward()
    optimizer.step()
    assert untouched.changed()
    hmpx.restore(optimizer)
    assert not untouched.changed() and "hmpx_seed" not in str(optimizer.state_dict())
    assert {v.dtype for v in optimizer.state[model.weight].values() if v.dim()} == {torch.bfloat16}


def test_names_are_given_as_they_stand_in_a_file(lists):
    by_file = hmpx.convert(**lists(bf16="matmul", fp32="exp", promote=""))
    by_name = hmpx.convert(bf16=["matmul"], fp32=(name for name in ("exp",)), promote=[])
    assert by_name.policy == by_file.policy
    assert by_name.policy.origins["matmul"].partition(":")[0] == __file__
    assert hmpx.convert(bf16=["exp"]).policy.rule(catalog()["exp"]) is hmpx.Rule.BF16  # outranks the default
    before = torch.matmul
    for wrong, said in (
        (dict(bf16=["sofmax"]), f"{__file__}:.*, hmpx.convert: unknown op 'sofmax'; did you mean 'softmax'"),
        (dict(bf16=["aten::mm"]), "^hmpx.convert: 'aten::mm' is no op name; did you mean 'mm'"),
        (dict(bf16="linear"), "bf16 is 'linear', not a list of names; a file goes to bf16_file_path"),
        (dict(bf16=["mm"], bf16_file_path="mine.txt"), "bf16 and bf16_file_path: which of the two"),
        (dict(bf16=["mm"], fp32=["mm"]), "'mm' is on both sides"),
        (dict(opt_level="O2", fp32=["mm"]), "O2 decides by itself and takes no op lists"),
    ):
        with pytest.raises(hmpx.HmpxError, match=said):
            hmpx.convert(**wrong)
        assert torch.matmul is before
    hmpx.restore()


@pytest.mark.parametrize("convert", [hmpx.convert, hmpx.hmp.convert])
def test_an_argument_that_is_not_there_is_answered_with_the_nearest(convert, untouched):
    with pytest.raises(TypeError, match=r"no argument 'is_verbose'; did you mean 'isVerbose'"):
        convert(is_verbose=True)
    with pytest.raises(TypeError, match=r"no argument 'x' .legal: opt_level, bf16_file_path"):
        convert(x=1)


def test_nothing_is_patched_that_no_rule_needs(lists):
    with hmpx.convert(**lists(bf16="exp", promote="add cat stack where")) as handle:
        assert {patch.op for patch in handle.patched if patch.rule is hmpx.Rule.BF16} == {"exp"}
        promoted = {patch.op for patch in handle.patched if patch.rule is hmpx.Rule.PROMOTE}
        assert promoted <= op_facts.REFUSES_MIXED and not promoted & {"add", "cat", "stack", "where"}
        assert torch.sin is SIN and torch.add is ADD


def test_the_handle_says_what_was_patched_and_what_escaped(lists):
    handle = hmpx.convert(**lists(bf16="linear index_put_impl_ nosuchmodule.f", fp32="softmax"), unknown="warn")
    labels = {patch.label for patch in handle.patched if patch.op == "softmax"}
    assert labels == {"torch.softmax", "torch._VF.softmax", "Tensor.softmax"}
    assert any("nosuchmodule.f is not imported yet" in line for line in handle.escaped)
    assert "active" in repr(handle)
    hmpx.restore()


def test_an_aten_op_without_python_entry_escapes_by_name(lists):
    handle = hmpx.convert(**lists(bf16="_foreach_add mkldnn_rnn_layer", fp32="multi_margin_loss_backward"))
    assert any("multi_margin_loss_backward has no Python entry point" in line for line in handle.escaped)
    hmpx.restore()


def test_many_threads_convert_compute_and_restore_without_harm(lists, untouched):
    arguments, errors = lists(bf16="matmul"), []

    def work():
        try:
            for _ in range(2):
                hmpx.convert(**arguments)
                X @ X
                hmpx.restore()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hmpx.restore()
    assert not errors and not untouched.changed()


def test_verbose_says_each_decision_once_and_counts_at_the_end(lists, caplog):
    caplog.set_level(logging.INFO, "hmpx")
    hmpx.convert(**lists(bf16="linear", fp32="softmax"), isVerbose=True)
    for _ in range(3):
        F.linear(X, X)
    F.softmax(X.bfloat16(), 1)
    assert "hmp:verbose_mode  True" in caplog.text and "hmp:opt_level  O1" in caplog.text
    line = "linear as torch.nn.functional.linear, bf16: float32, float32 -> bfloat16, bfloat16 -> bfloat16 at "
    (said,) = (text for text in caplog.text.splitlines() if line in text)
    assert re.search(rf"bfloat16 at {re.escape(__file__)}:\d+, outside of any model$", said)
    assert "softmax as Tensor.softmax, fp32: bfloat16 -> float32 -> float32" in caplog.text
    hmpx.restore()
    assert f"3 times {line}" in caplog.text


IN_ORDER = """
import hmpx, logging, sys, torch
sys.stdout.reconfigure(write_through=False)  # as it is by default, whatever PYTHONUNBUFFERED says
x = torch.ones(2, 2)
print("first")
hmpx.convert(isVerbose=True)
print("second")
x @ x
logging.getLogger("hmpx").warning("a warning")
print("third")
hmpx.convert(isVerbose=True)
x @ x
print("last")
"""


def test_verbose_stands_between_what_the_program_prints():
    """Both streams in one pipe, as `python train.py 2>&1 | tee log`; the counts come where nothing restores, too."""
    command = [f"{python.folder()}/python", "-c", IN_ORDER]
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = subprocess.run(command, env=python.environment(), check=True, **together).stdout.splitlines()
    converted = ["hmp:verbose_mode", "hmp:opt_level", "mul rounds positions"]
    words = ["first", *converted, "second", "matmul as", "a warning", "third", "1 times matmul"]
    words += [*converted, "matmul as", "last", "1 times matmul"]
    lines = [line for line in lines if "kernels" not in line]  # of a CPU without BF16 instructions
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True)), lines


@pytest.mark.slow
def test_every_entry_point_builds_under_every_rule():
    for op in catalog().values():
        for entry in op.entries:
            original = getattr(entry.owner, entry.attribute)
            for rule in hmpx.Rule:
                running = {Case(rule): original}
                assert callable(build_choice(op.name, entry, (*running,), original, Switch(), running.get))


def test_public_names_are_exactly_all():
    public = {name for name in dir(hmpx) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(hmpx, name)) is type(hmpx)} - {"hmp"}
    assert public - modules == set(hmpx.__all__) and len(hmpx.__all__) <= 30
    with pytest.raises(AttributeError, match="module 'hmpx' has no attribute 'recrod'"):
        getattr(hmpx, "recrod")  # noqa: B009


def test_an_import_leaves_torch_alone_and_what_explains_and_searches_is_loaded_at_its_first_use():
    code = (
        "import sys, torch; before = dict(vars(torch)), dict(vars(torch.Tensor)); import hmpx;"
        "assert before == (dict(vars(torch)), dict(vars(torch.Tensor)));"
        "own = [name for name in sys.modules if name.startswith('hmpx')];"
        "above = [name for name in own if 'insight' in name or 'recipes' in name];"
        "assert not above, above; assert hmpx.Recipe and callable(hmpx.prepare);"
        "assert hmpx.Log.__module__ == hmpx.insight.recording.log.__name__ and callable(hmpx.tune)"
    )
    python.run("-c", code, check=True)


def test_the_source_of_a_written_wrapper_can_be_read_and_tracebacks_show_it():
    with hmpx.convert():
        for function in (torch.nn.functional.linear, torch.bmm, torch.nn.functional.linear):
            source = inspect.getsource(function)
            assert source.lstrip().startswith(f"def {function.__name__}(") and "return _unusual(" in source
            compile(textwrap.dedent(source), "<again>", "exec")
        linecache.checkcache()
        files = [torch.nn.functional.linear.__code__.co_filename, torch.bmm.__code__.co_filename]
        assert all(file.startswith("<hmpx") and linecache.getlines(file) for file in files) and len(set(files)) == 2
        with pytest.raises(RuntimeError) as error:
            torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 4))
        written = [entry for entry in error.traceback if str(entry.path).startswith("<hmpx")]
        shown = "".join(traceback.format_tb(error.tb))
        assert written and "return _run(_input_cast" in shown
