"""The reference, `hmpx/API.md`, is written from the docstrings of the public names, and names all of them."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hmpx
from hmpx.insight.precision import Precision, PrecisionRow
from hmpx.insight.recording.recorded import RoundTrip, Site


def test_the_reference_is_up_to_date(request):
    path = Path(hmpx.__file__).parent / "API.md"
    if request.config.getoption("--update"):
        path.write_text(reference(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == reference(), "python -m pytest tests/test_api.py --update writes it"


def test_the_reference_has_every_public_name():
    assert {*hmpx.__all__} <= {*" ".join(GROUPS.values()).split()}


PARTS = {"Log": (Site, RoundTrip), "Diagnosis": (Precision, PrecisionRow)}  # what attributes and methods give
GROUPS = {
    "A whole run": "prepare activate restore Recipe Activation",
    "Which op runs in what": """convert policy_for policies_of casts bf16 fp16 fp32 promote cached_weights Conversion
        ModuleRule Policy Rule""",
    "Updates": "disable_casts enable_casts attach detach stochastic_round stochastic_round_ Attachment",
    "What happened, and why": """doctor record compare tune explain Diagnosis Finding Log Comparison Row Tuned
        Choice""",
    "Habana's names": "hmp",
    "Errors": "HmpxError OpListError UnknownOpError OptLevelError",
}
# What functions return or raise, whose examples show it, what the guide has an example of, and what `bf16` shows.
WITHOUT_EXAMPLE = """Activation Conversion ModuleRule Rule Attachment Diagnosis Precision PrecisionRow Finding Log Site
    RoundTrip Comparison Row Tuned Choice OpListError UnknownOpError OptLevelError hmp fp16 fp32 promote""".split()
_HEAD = """\
# API

Written from the docstrings by `python -m pytest tests/test_api.py --update`; edit those. The
[guide](../examples/README.md) shows how the parts go together. What stands here is public: a change of it is named in
the [changelog](CHANGELOG.md). Classes stand here where functions return them; they are for annotations and
`isinstance`. What insight returns has `as_json()`, all of it as objects of JSON; `json(path)`, which saves them by the
names of the attributes; and `html(path)`, which saves one page that needs no network and no other file.

"""
_KEYS = "The attributes are the [keys](../oplists/README.md#keys) of a recipe."
_OF_REPORTS = ("as_json", "json", "html")  # said once, above
# Before an item: a line that is not indented, or the end of a sentence and names with a colon behind them.
_NAMED = re.compile(r"\n(?! )|(?<=\.)\s+(?=[a-z_]\w*(?:, [a-z_]\w*)*: |\w+Error: )")
_NAME = re.compile(r"^(\w+(?:, \w+)*): ")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n", re.MULTILINE)


def reference() -> str:
    """Return the text of the reference."""
    contents = [f"**{group}**: {', '.join(map(_link, names.split()))}" for group, names in GROUPS.items()]
    parts = [_HEAD + "\\\n".join(contents)]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names.split():
            parts += _entry(f"hmpx.{name}", getattr(hmpx, name), "###")
            for part in PARTS.get(name, ()):
                parts += _entry(part.__name__, part, "####")
    text = "\n\n".join(parts) + "\n"
    text = re.sub(r"\n\n(?=- |```pycon)", "\n", text)  # a list and a block of code need no empty line before them
    text = re.sub(r"^(#+ .*)\n\n", r"\1\n", text, flags=re.MULTILINE)  # nor does what stands below a heading
    return re.sub(
        r"^((?![-#`*|]|\[).*[.:])\n\n(?=[A-Z`\"])(?!```)", r"\1\\\n", text, flags=re.MULTILINE
    )  # prose goes on in its own line


def _link(name: str) -> str:
    return f"[{name}](#hmpx{name.lower()})"


def _entry(name: str, thing: Any, heading: str) -> Iterator[str]:
    """Yield the paragraphs of one name, and of the methods of a class or the functions of a module."""
    yield f"{heading} `{name}`"
    said = _prose(inspect.getdoc(thing) or "", name.rpartition(".")[2] in WITHOUT_EXAMPLE)
    if inspect.isfunction(thing):
        yield f"`{_signature(name.rpartition('.')[2], thing)}`\\\n{next(said)}"
    yield from (_KEYS if thing is hmpx.Recipe and part.startswith("- `") else part for part in said)
    if inspect.ismodule(thing):
        for each in thing.__all__:
            if getattr(thing, each) is not getattr(hmpx, each, None):
                yield from _entry(f"{name}.{each}", getattr(thing, each), "####")
    elif inspect.isclass(thing) and not issubclass(thing, (enum.Enum, Exception)):
        methods = [
            f"`{_signature(each, method)}`: " + " ".join(_prose(inspect.getdoc(method) or "", is_short=True))
            for each, method in sorted(inspect.getmembers(thing))
            # The others are for hmpx itself; of one whose docstring is a line, the words of the class say it.
            if inspect.isroutine(method) and f"`{each}(" in (thing.__doc__ or "") and each not in _OF_REPORTS
            if "\n" in (inspect.getdoc(method) or "")
        ]
        if methods:
            yield _list(methods)


def _signature(name: str, function: Any) -> str:
    """Return a call with its parameters and their defaults; their types stand in the words."""
    parameters = [each.replace(annotation=each.empty) for each in inspect.signature(function).parameters.values()]
    shown = [each for each in parameters if each.name not in ("self", "cls")]
    return f"{name}{inspect.Signature(shown)}"


def _prose(docstring: str, is_short: bool = False) -> Iterator[str]:
    """Yield a docstring as paragraphs of Markdown: arguments, result and errors as one list, attributes as another.

    is_short: without examples, and no list.
    """
    listed = " ".join if is_short else _list
    first, *rest = _SECTION.split(docstring)
    yield from _paragraphs(first)
    points: list[str] = []
    for section, text in zip(rest[::2], rest[1::2], strict=True):
        indented = re.match(r"(?: .*\n?|\n)*", text).group()
        block = textwrap.dedent(indented).strip()
        items = [" ".join(item.split()) for item in _NAMED.split(block)]
        if section == "Attributes":
            yield _list([_NAME.sub(lambda found: f"`{found[1]}`: ", item) for item in items])
        elif section == "Returns":
            points.append(f"Returns: {' '.join(block.split())}")
        elif section != "Example":
            named = [_NAME.sub(lambda found: f"`{found[1]}`: ", item) for item in items]
            points += named if section == "Args" else [f"Raises {' '.join(named)}"]
        elif not is_short:
            yield from filter(None, (listed(points), f"```pycon\n{block}\n```"))
            points = []
        after = [*_paragraphs(text[len(indented) :])]
        if after:
            yield from filter(None, (listed(points), *after))
            points = []
    yield from filter(None, (listed(points),))


def _list(points: list[str]) -> str:
    return "\n".join(f"- {point}" for point in points)


def _paragraphs(text: str) -> Iterator[str]:
    yield from (" ".join(each.split()) for each in re.split(r"\n\s*\n", text) if each.strip())
