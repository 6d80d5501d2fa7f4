"""Files that somebody else has written: whatever is in them is read at once, or is an error with file and line."""

import itertools
import os

import pytest

import hmpx
from hmpx.insight.check import check_files
from hmpx.recipes.reading import read_recipe
from tests.support import python

ANCHORS = "abcdefghi"
NESTED = "modules:\n  a: &a {fp32: [mm, mm]}\n" + "".join(
    f"  {name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise(ANCHORS)
)
WRONG = {
    "aliases that repeat aliases": (NESTED, ":6: more than 50000 names and values, with those that aliases repeat"),
    "an alias in what it repeats": ("seed: 1\nbf16: &a [*a]\n", ":2: more than 50000 names and values, with those"),
    "deep nesting": (f"seed: 1\nbf16: {'[' * 600}{']' * 600}\n", ":2: too many lists and mappings in one another"),
    "control characters": ("seed: 1\nbf16: [\x01]\n", ":2: not YAML: special characters are not allowed"),
    "a byte that is no UTF-8": (b"seed: 1\nbf16: [\xff]\n", ":2: not UTF-8 text (byte 0xff)"),
    "a long number": (f"seed: 1\nbf16: {'9' * 5000}\n", ":2: not YAML: Exceeds the limit"),
    "a large file": ("#" * 2**21, ": is larger than 1048576 bytes"),
}


def refused(read, path):
    with pytest.raises(hmpx.HmpxError) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_does_harm_is_refused_with_its_line(what, tmp_path):
    text, message = WRONG[what]
    path = tmp_path / "foreign.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused(read_recipe, path).startswith(f"{path}{message}")
    assert refused(lambda path: hmpx.convert(bf16_file_path=path), path).startswith(f"{path}{message}")
    (found,) = check_files([str(path)])
    assert str(found).startswith(f"{path}{message}")


def test_aliases_that_repeat_little_are_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("modules:\n  a: &rule {fp32: &ops [linear, mm]}\n  b: *rule\n  c: {bf16: *ops}\n")
    assert read_recipe(path).modules["c"] == {"bf16": ["linear", "mm"]}
    assert read_recipe(path).modules["b"] == read_recipe(path).modules["a"]


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.yaml", "zero.txt", "zero.yaml"])
def test_a_pipe_and_a_device_are_no_files(name, tmp_path):
    path = tmp_path / name
    os.mkfifo(path) if "pipe" in name else path.symlink_to("/dev/zero")
    (tmp_path / "mine.yaml").write_text(f"seed: 1\nfp32_file_path: {name}\nextends: {name}\n".replace(
        "extends" if name.endswith("txt") else "fp32_file_path", "# "))  # fmt: skip
    with pytest.raises(hmpx.HmpxError, match="no regular file"):
        hmpx.convert(bf16_file_path=path)
    with pytest.raises(hmpx.HmpxError, match=r"mine.yaml:[23]: .*no regular file"):
        hmpx.activate(tmp_path / "mine.yaml")
    assert "no regular file" in str(next(check_files([str(path)])))


DOTTED = {
    "mine.yaml": "extends: base.yaml\nfp32_file_path: mine.txt\nmodules:\n  head: {bf16: [evil.inside]}\n",
    "base.yaml": "bf16: [linear, evil.f, math.sin, evil.sub.f]\n",
    "mine.txt": "evil.listed\nlazy.later\n",
    "list.json": '{"hmp_bf16_ops": ["evil.f"]}',
    "evil/__init__.py": "open('imported', 'w')\n",
    "evil/sub.py": "",
    "lazy.py": "def __getattr__(name):\n    import evil\n",
}
READS = ["explain mine.yaml mine.txt list.json", "explain mine.yaml --yaml", "explain mine.yaml"]
READS += ["explain evil.f --list mine.yaml", "explain evil.f --recipe mine.yaml", "explain --recipe mine.yaml"]
NAMED = [(1, "evil.listed"), (2, "lazy.later")]
READ = """
import sys, lazy
from hmpx.shell.main import main
for command in sys.argv[1:]:
    print("@", command)
    main(command.split())
    assert "evil" not in sys.modules, command
"""


def test_what_reads_a_file_imports_no_module_that_the_file_names(tmp_path):
    for name, text in DOTTED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    printed = python.run("-c", READ, *READS, cwd=tmp_path, check=True).stdout
    assert not (tmp_path / "imported").exists()
    said = {each.partition("\n")[0]: each.partition("\n")[2] for each in f"\n{printed}".split("\n@ ")}
    lines = said[READS[0]].splitlines()
    assert sorted(line.partition(" is in no module that is imported")[0] for line in lines) == sorted(
        [
            "base.yaml:1: not decided: evil.f",
            "base.yaml:1: not decided: evil.sub.f",
            "mine.yaml:4, modules 'head': not decided: evil.inside",
            *(f"mine.txt:{i}: not decided: {name}" for i, name in NAMED * 2),
            "list.json:1: not decided: evil.f",
            "3 checked, 0 problems",
        ]
    )
    assert "not decided: evil.f" in said["explain evil.f --recipe mine.yaml"]
