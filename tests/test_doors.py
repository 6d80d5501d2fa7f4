"""What stands in several files has the same in each: a test for each "To change one thing" of a README.

Each fails with the name of the file that is to be edited.
"""

import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

import hmpx
from hmpx.insight.explain import recipe_lines
from hmpx.insight.looks.checks import CHECKS
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import KEYS, LEGAL
from hmpx.rounding import eager, native, shared, table
from hmpx.rounding.state_codes import _PREFIXES, STATE_CODES, _code_of, code_of
from hmpx.shell.main import _COMMANDS
from hmpx.updates.stepping.optimizer_classes import _FORMULAS, _FORMULAS_BY_NAME
from tests.support.formulas import CONFIGURATIONS
from tests.support.kernel_steps import STATES, STEPS
from tests.support.planted_trainings import PLANTED
from tests.support.state_codes import PREFIXES

ROOT = Path(__file__).parent.parent
ROUNDING = ROOT / "hmpx" / "rounding"


def text(name):
    return (ROUNDING / name).read_text(encoding="utf-8")


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")
def test_kernels_in_c_compile():
    """Else all their tests are skipped. A name that C lacks is defined in `for_c` of rounding/shared.py."""
    try:
        native._build()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"rounding/*.c, or `for_c` of rounding/shared.py: {error}")


def test_a_kernel_stands_in_every_backend_and_is_tested():
    kernels = [*eager.KERNELS]
    assert "KERNEL(" in text("native_steps.c") and "FOR_EACH_KERNEL(FORMS)" in text("native_steps.c")
    in_c = set(re.findall(r"^KERNEL\((\w+),", text("native_steps.c"), re.MULTILINE))
    assert in_c == {*kernels}, "rounding/native_steps.c: KERNEL"
    in_triton = re.search(r"\n(ADAM, [\w, ]+) = \(tl", text("triton_kernels.py"))[1].split(", ")
    assert in_triton == [name.upper() for name in kernels], "rounding/triton_kernels.py: the names of kernels"
    branches = {name for name in in_triton if re.search(rf"KERNEL == {name}\b", text("triton_kernels.py"))}
    assert len({*in_triton} - branches) <= 1, f"rounding/triton_kernels.py: no branch of {set(in_triton) - branches}"
    assert [*STEPS] == [*STATES] == kernels, "tests/support/kernel_steps.py: STEPS, STATES"
    formulas = [*_FORMULAS.values(), *_FORMULAS_BY_NAME.values()]
    assert {each.kernel for each in formulas} == {*kernels}, "updates/stepping/optimizer_classes.py: _FORMULAS"


@pytest.mark.parametrize("kernel", eager.KERNELS)
def test_the_scalars_of_a_kernel_have_one_order(kernel):
    """That of rounding/eager.py; of Triton, which has no names for them, each number that is read."""
    _weight, _gradient, _states, *others = inspect.signature(eager.KERNELS[kernel]).parameters
    names = ["sign", "l2", *others]
    loop = re.search(rf"^KERNEL\({kernel},.*?^}}", text("native_steps.c"), re.M | re.S)[0]
    in_c = dict(sorted((int(i), name) for name, i in re.findall(r"(\w+) = s\[(\d+)\]", loop)))
    assert in_c == dict(enumerate(names)), "rounding/native_steps.c"
    *others, last = re.split(
        r"\n    (?:el)?if KERNEL == |\n    else:", text("triton_kernels.py").partition("def stepped")[2]
    )
    branch = next((each for each in others if each.startswith(f"{kernel.upper()}:")), last.partition("return")[0])
    read = {0, 1, *map(int, re.findall(r"s \+ (\d+)", branch))}  # the first two are read by all
    wanted = {i for i, name in enumerate(names) if name != "centered"}  # which Triton asks of the state
    assert read == wanted, f"rounding/triton_kernels.py: {kernel}"
    lengths = {len(scalars) for scalars in STEPS.get(kernel, ())}
    assert lengths == {len(names)}, "tests/support/kernel_steps.py: STEPS"


def test_an_optimizer_that_a_kernel_steps_is_tested_and_named():
    tested = {f"{cls.__module__}.{cls.__qualname__}" for cls, _ in CONFIGURATIONS.values()}
    for name in [*(f"{cls.__module__}.{cls.__qualname__}" for cls in _FORMULAS), *_FORMULAS_BY_NAME]:
        assert name in tested, f"tests/support/formulas.py: CONFIGURATIONS has no {name}"
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", guide()), f"examples/README.md says nothing of {name}"


def guide():
    return (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_a_kind_of_tensor_has_one_number_everywhere():
    names = [*shared.HALF_BYTES]
    assert [getattr(shared, name) for name in names] == [*range(len(names))], "rounding/shared.py"
    said = re.search(r"/\* How a tensor is stored.*?\*/", text("native_stored.c"), re.DOTALL)[0]
    assert re.findall(r"^   ([A-Z][A-Z\d]*) ", said, re.MULTILINE) == names[1:], (
        "rounding/native_stored.c: what kinds are"
    )
    (in_triton,) = re.findall(r"^(ABSENT[\w, ]+) = ", text("triton_kernels.py"), re.MULTILINE)
    assert in_triton.split(", ") == names, "rounding/triton_kernels.py: kinds"
    coded = {code.kind for code in STATE_CODES.values() if code.kind is not None}
    assert {*shared.CODES} == coded and coded <= {*table._DRAWN}, "rounding/shared.py: CODES"


def test_a_code_of_state_is_tested_and_told_from_the_others(monkeypatch):
    assert {*get_args(shared.CodeName)} == {*STATE_CODES}, "rounding/shared.py: CodeName"
    assert {name: code.prefix for name, code in STATE_CODES.items()} == PREFIXES, (
        "tests/support/state_codes.py: PREFIXES"
    )
    for code in STATE_CODES.values():
        assert f'`"{code.name}"`' in guide(), f"examples/README.md: no row of {code.name}"
        assert code_of(f"{code.prefix}exp_avg") is code and code_of(f"hmpx_no_{code.name}_exp_avg") is None
    monkeypatch.setitem(_PREFIXES, f"{STATE_CODES['fp8'].prefix}longer_", STATE_CODES["8bit"])
    assert code_of(f"{STATE_CODES['fp8'].prefix}longer_momentum") is STATE_CODES["8bit"], "the longest prefix decides"
    _code_of.cache_clear()


# What kernels "auto" means depends on the CPU, and `verbose` changes no number.
@pytest.mark.parametrize("key", sorted({*LEGAL} - {"kernels", "verbose"}))
def test_explain_has_words_of_its_own_for_each_legal_value(key):
    beside = {"weights": "master"} if key == "use_master_weights_in_ckpt" else {}
    said: dict[str, object] = {}
    for value in LEGAL[key]:
        recipe = as_recipe({"parameter_dtype": "bfloat16", **beside, key: value})
        try:
            lines = str(recipe_lines(recipe))
        except KeyError as error:
            raise AssertionError(f"insight/explain.py: no words for {key}: {value}") from error
        assert lines not in said, f"insight/explain.py: {key}: {value} reads as {said[lines]}"
        said[lines] = value


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_recipe_refuses_what_it_cannot_mean(key):
    for value in ("no such value", 3.5, object):
        with pytest.raises(hmpx.HmpxError):  # else recipes/keys.py takes any value
            as_recipe({key: value})


def test_the_page_names_each_key_of_a_recipe_and_its_values():
    page = (ROOT / "oplists" / "README.md").read_text(encoding="utf-8")
    rows = {
        key: {*re.findall(r"`(\w+)`", values)}
        for keys, values in re.findall(r"^\| (`[^|]*)\|([^|]*)", page, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", keys)
    }
    assert {*KEYS} <= rows.keys(), "oplists/README.md: keys"
    for key, legal in LEGAL.items():
        words = {"null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal}
        assert rows[key] == words, f"oplists/README.md: {key}"


def test_each_look_at_an_op_is_planted():
    planted = {name.partition(":")[0] for name in PLANTED}
    for each in CHECKS:
        assert each.kind in planted, f"tests/support/planted_trainings.py: no fault of the kind {each.kind!r}"


def test_the_guide_names_each_command():
    pages = guide() + (ROOT / "README.md").read_text(encoding="utf-8")
    for name in _COMMANDS:
        assert re.search(rf"hmpx {name}\b|`{name} ", pages), f"README.md, examples/README.md: {name}"


ROOMS = ("base", "ops", "recipes", "rounding", "updates", "insight", "shell")


@pytest.mark.parametrize("room", ROOMS)
def test_the_files_of_to_change_one_thing_are_there(room):
    page = (ROOT / "hmpx" / room / "README.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"^## To change one thing\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    files = re.findall(r"`([\w./]+\.(?:py|c|h|md|yaml|txt))`", part)
    assert files, room
    for file in files:
        known = [base / file for base in (ROOT / "hmpx" / room, ROOT / "hmpx", ROOT) if (base / file).is_file()]
        assert known, f"hmpx/{room}/README.md: {file}"
