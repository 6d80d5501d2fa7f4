"""One owner of what casts keep for the whole process: it says what is in use, and nobody else keeps any."""

import ast
from pathlib import Path

import torch

import hmpx
from hmpx.base import process_state

PACKAGE = Path(hmpx.__file__).parent
OP_ROAD = [
    *(PACKAGE / "ops").rglob("*.py"),
    *(PACKAGE / f"{n}.py" for n in ("conversion", "regions")),
]


def test_it_says_what_is_in_use_and_nothing_afterwards(lists):
    assert process_state.in_use() == {}
    with hmpx.convert(**lists(bf16="linear"), isVerbose=True, enabled=False) as handle:
        found = process_state.in_use()
        assert found.keys() == {"installed", "converted", "off", "observer", "awaited", "first_steps", "learn"}
        assert found["installed"] == {hmpx.Conversion: handle}
        with hmpx.cached_weights():
            assert process_state.in_use().keys() - found.keys() == {"open_caches"}
            assert torch.Tensor.data is not vars(torch._C.TensorBase)["data"]
    assert process_state.in_use() == {}
    with hmpx.disable_casts():
        assert process_state.in_use().keys() - {"awaited"} == {"off"}
    assert process_state.in_use().keys() <= {"awaited"}  # by what stands in optimizers until then
    hmpx.restore()
    assert process_state.in_use() == {}


def test_a_list_that_waits_for_a_module_is_in_use_until_the_end(lists):
    with hmpx.convert(**lists(bf16="not_there_yet.function"), unknown="warn") as handle:
        assert handle.escaped and "not_there_yet" in process_state.in_use()["awaited"]
    assert process_state.in_use() == {}


def test_no_other_module_of_the_op_road_has_a_variable_that_it_exchanges():
    exchanged = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {', '.join(node.names)}"
        for path in OP_ROAD
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Global)
    ]
    assert exchanged == []
