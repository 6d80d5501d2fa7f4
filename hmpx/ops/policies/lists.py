"""Op lists: six keys, from whatever says them, in which every name knows its place.

`OpLists.of` is the one check of these keys: of files, recipes, rules of modules, `casts` regions and `hmpx.convert`.

Files come in three formats, by suffix. `.yaml`/`.yml`: the keys `bf16`, `fp32`, `promote`, `fp8`, each a list of names,
`low_precision`, the dtype that the bf16 list stands for, and `fp8_format`, how ops in the fp8 list are multiplied.
`.json`: a Gaudi configuration with `hmp_bf16_ops`, `hmp_fp32_ops`, or, under `use_torch_autocast`, `autocast_bf16_ops`
and `autocast_fp32_ops`; one with `hmp_opt_level` O2 takes none. Anything else is text: one name a line, `#` starts a
comment.

A file is read once, eagerly: callers may delete it after the call. An empty list is a real list; a key that is absent
or null says nothing, and the default list stands.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from hmpx.base.files import places_inside, root_of, text_of, value_of
from hmpx.errors import OpListError, Origin, Places, did_you_mean, errors_at, kind_of
from hmpx.ops.policies.fp8_format import Format

SIDES = ("bf16", "fp32", "promote", "fp8")
LOW_PRECISION, FP8_FORMAT = "low_precision", "fp8_format"
LIST_KEYS = (*SIDES, LOW_PRECISION, FP8_FORMAT)
MORE = "..."  # in a list of a recipe: the names of the list that it changes
LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_YAML = {key: key for key in LIST_KEYS}
_OF_GAUDI = [{f"{system}_{side}_ops": side for side in ("bf16", "fp32")} for system in ("hmp", "autocast")]
_BY_HMP, _BY_AUTOCAST, _LEVEL = "use_habana_mixed_precision", "use_torch_autocast", "hmp_opt_level"
_TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


class Listed(NamedTuple):
    """One name in an op list, and its place: the line of a file, or words."""

    name: str
    place: Origin | str

    @property
    def where(self) -> str:
        return str(self.place)


@dataclass(frozen=True)
class OpLists:
    """The names on each side, what the bf16 list runs in, and how the fp8 list is multiplied; None if not given.

    newer: names that a list has for newer versions of torch.
    """

    bf16: tuple[Listed, ...] | None = None
    fp32: tuple[Listed, ...] | None = None
    promote: tuple[Listed, ...] | None = None
    fp8: tuple[Listed, ...] | None = None
    low_precision: torch.dtype | None = None
    fp8_format: Format | None = None
    newer: tuple[Listed, ...] | None = None

    @classmethod
    def of(
        cls, said: Mapping[str, Any], place: Origin | str, places: Places | None = None, may_add: bool = False
    ) -> OpLists:
        """Check the six keys, and return what they say. Whether a name is that of an op, `build_policy` looks up.

        Args:
            said: names by side, a dtype or its name under "low_precision", a name or keys under "fp8_format".
            place: of names that are not in `places`.
            places: by ``("bf16",)``, and by ``("bf16", 0)`` for a first name.
            may_add: whether "..." may stand in a list, and be left out.

        Raises:
            OpListError: a key or a value that is none, with the nearest legal one.
        """
        own: dict[str, Any] = {}
        known = places or {}
        with errors_at(known):
            for key, value in said.items():
                if key not in LIST_KEYS:
                    hint = did_you_mean(str(key), LIST_KEYS)
                    raise OpListError(f"{key!r} is no list{hint} (legal: {', '.join(LIST_KEYS)})", key=(key,))
                if value is None:
                    continue
                if key in SIDES:
                    own[key] = tuple(_listed(key, value, known.get((key,), place), known, may_add))
                elif key == LOW_PRECISION:
                    low = LOW_DTYPES.get(value) if isinstance(value, str) else value
                    if low not in [*LOW_DTYPES.values()]:
                        hint = did_you_mean(str(value), LOW_DTYPES)
                        raise OpListError(f"{key} is {value!r}, none of {', '.join(LOW_DTYPES)}{hint}", key=(key,))
                    own[key] = low
                else:
                    with errors_at({}, before=f"{key}: ", key=(key,)):
                        own[key] = Format.of(value)
        return cls(**own)

    @property
    def sides(self) -> dict[str, tuple[Listed, ...]]:
        """The lists that are given."""
        return {side: listed for side in SIDES if (listed := getattr(self, side)) is not None}

    def over(self, other: OpLists) -> OpLists:
        """Return these lists, with those of `other` where none is given here."""
        both = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return OpLists(**{key: theirs if own is None else own for key, (own, theirs) in both.items()})

    @classmethod
    def read(cls, path: str | os.PathLike[str], side: str) -> OpLists:
        """Read one op list file; a text file's names go to `side`.

        Raises:
            OpListError: no list can be made of it.
        """
        path = os.fspath(path)
        text, suffix = text_of_list(path), Path(path).suffix.lower()
        if suffix in (".yaml", ".yml", ".json"):
            return cls.of(*_of_tree(path, text, suffix == ".json"))
        return cls.of_text(text, path, side)

    @classmethod
    def of_text(cls, text: str, path: str, side: str) -> OpLists:
        """Read the text of a file, one name a line.

        Raises:
            OpListError: the first line that has no name.
        """
        lines, newer = list[tuple[int, str]](), list[Listed]()
        for number, line in enumerate(text.splitlines(), 1):
            name, _, wanted = (part.strip() for part in line.partition("#")[0].partition(";"))
            since, before = _versions(wanted, Origin(path, number))
            if since > _TORCH:
                version = ".".join(map(str, since))
                said = f"in {path}:{number} from torch {version} on (this is {torch.__version__})"
                newer.append(Listed(name, said))
            elif name and before > _TORCH:
                lines.append((number, name))
        places = {(side, i): Origin(path, number) for i, (number, _) in enumerate(lines)}
        return replace(cls.of({side: [name for _, name in lines]}, Origin(path), places), newer=tuple(newer) or None)


def _versions(wanted: str, place: Origin) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the version of torch from which on a list has a name, and the one from which on it has not."""
    found = re.fullmatch(r"|torch *(>=|<) *(\d+)\.(\d+)", wanted)
    if found is None:
        said = "behind a name and a semicolon stands the version of torch, torch >= 2.12 or torch < 2.14"
        raise OpListError(f"{wanted!r}: {said}", place)
    sign, *numbers = found.groups("0")
    version = tuple(map(int, numbers))
    return ((0,), version) if sign == "<" else (version, (math.inf,))


def _listed(side: str, value: Any, place: Origin | str, places: Places, may_add: bool) -> Iterable[Listed]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise OpListError(f"{side} is {value!r}, not a list of names; a file goes to {side}_file_path", key=(side,))
    for i, name in enumerate(value):
        key = (side, i)
        if name is ...:
            name = MORE
        if not isinstance(name, str):
            raise OpListError(f"{side}: {name!r} is no name, but {kind_of(name)}", key=key)
        if name == MORE:
            if may_add:
                continue
            raise OpListError(
                f"{name!r} stands in the lists of recipes: extends: autocast-cuda, fp32: [..., log]", key=key
            )
        if not _NAME.match(name):
            words = [word for word in re.split(r"[\s,;]+", name.removeprefix("aten::")) if _NAME.match(word)]
            hint = "; write one name a line" if len(words) > 1 else f"; did you mean {words[-1]!r}?" if words else ""
            line = place if isinstance(place, Origin) and key not in places else ""
            raise OpListError(f"{name!r} is no op name{hint}", line, key=key)
        yield Listed(name, places.get(key, place))


def shipped() -> Path:
    """Return the folder of the op lists that come with hmpx."""
    return Path(str(resources.files("hmpx"))) / "oplists"


def is_shipped(origin: str) -> bool:
    """Return whether a name's origin, `file:line`, is a list that hmpx ships."""
    return os.path.realpath(origin).startswith(f"{os.path.realpath(shipped())}{os.sep}")


@functools.cache
def default_lists() -> OpLists:
    """Return the default lists: HMP's published defaults."""
    return read_lists(*(shipped() / "default" / f"{side}.txt" for side in SIDES))


def read_lists(
    bf16_file_path: str | os.PathLike[str] | None = None,
    fp32_file_path: str | os.PathLike[str] | None = None,
    promote_file_path: str | os.PathLike[str] | None = None,
    fp8_file_path: str | os.PathLike[str] | None = None,
) -> OpLists:
    """Read up to four files. ``""`` and None mean: not given.

    A file with several sides in it (YAML, JSON) fills its own argument's side, and every side whose argument is not
    given.

    Raises:
        OpListError: a file that cannot be read or has another shape; a side that two files fill; two low precisions.
    """
    given = dict(zip(SIDES, (bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path), strict=True))
    read: dict[str, OpLists] = {}
    for side, path in given.items():
        if not isinstance(path, str | os.PathLike | None):
            raise OpListError(
                f"{side}_file_path takes the path of a file, not a {type(path).__name__}; write the names into a text "
                "file, one a line"
            )
        if path is not None and os.fspath(path):
            with errors_at({}, key=(f"{side}_file_path",)):
                read[side] = OpLists.read(path, side)
    found: dict[str, Any] = {}
    for key in LIST_KEYS:
        offers = {side: value for side, lists in read.items() if (value := getattr(lists, key)) is not None}
        if key in read:
            offers = {key: getattr(read[key], key)}
        files = " and ".join(os.fspath(given[side] or "") for side in offers)
        if len(offers) > 1 and key in SIDES:
            raise OpListError(f"{files} both hold a {key} list; say which with {key}_file_path=")
        if len({*map(str, offers.values())}) > 1 and key == LOW_PRECISION:
            raise OpListError(f"{files} disagree: {key} is {' and '.join(map(str, offers.values()))}")
        found[key] = next(iter(offers.values()), None)
    return OpLists(**found, newer=tuple(each for lists in read.values() for each in lists.newer or ()) or None)


def text_of_list(path: str) -> str:
    """Return the text of an op list file.

    Raises:
        OpListError: it cannot be read.
    """
    try:
        return text_of(path, OpListError)
    except FileNotFoundError:
        raise OpListError(f"no such op list file{_instead_of(path)}", Origin(path)) from None
    except IsADirectoryError:
        raise OpListError("is a directory; an op list is a .txt, .yaml or .json file", Origin(path)) from None
    except OSError as error:
        raise OpListError(f"cannot be read: {error.strerror}", Origin(path)) from error


def _instead_of(path: str) -> str:
    folder = Path(path).parent
    siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    own = shipped().joinpath(*Path(path).parts[-2:])
    return f"; hmpx ships one: {own}" if own.is_file() else did_you_mean(Path(path).name, siblings, cutoff=0.8)


def _of_gaudi(path: str, root: yaml.MappingNode) -> dict[str, str]:
    """Return the keys by which a Gaudi configuration gives lists, and their sides.

    Raises:
        OpListError: it asks for HMP and for autocast, or for a level of HMP that takes no lists.
    """
    nodes = {key.value: value for key, value in root.value}
    places = {(key.value,): Origin(path, key.start_mark.line + 1) for key, _ in root.value}
    said = {key: value_of(path, nodes[key], OpListError) for key in (_BY_HMP, _BY_AUTOCAST, _LEVEL) if key in nodes}
    with errors_at(places):
        for key in said.keys() - {_LEVEL}:
            if not isinstance(said[key], bool | None):
                raise OpListError(f"{key} is {said[key]!r}, neither true nor false", key=(key,))
        if said.get(_BY_HMP) and said.get(_BY_AUTOCAST):
            raise OpListError(f"{_BY_HMP} and {_BY_AUTOCAST}: which of the two?", key=(_BY_AUTOCAST,))
        by_autocast = bool(said.get(_BY_AUTOCAST)) or nodes.keys().isdisjoint(_OF_GAUDI[0])
        if not by_autocast and said.get(_LEVEL, "O1") not in ("O1", "01"):
            hint = "HMP leaves these lists aside then (of O2: give opt_level O2, without this file)"
            raise OpListError(f"{_LEVEL} is {said[_LEVEL]!r}, and not O1: {hint}", key=(_LEVEL,))
    return _OF_GAUDI[by_autocast]


def _of_tree(path: str, text: str, is_json: bool) -> tuple[dict[str, Any], Origin, Places]:
    """Return what YAML or JSON says, its place, and those of what is in it; JSON is YAML once its tabs are blanks."""
    if is_json:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise OpListError(f"not JSON: {error.msg}", Origin(path, error.lineno)) from None
        except (RecursionError, ValueError):  # which line it is, is said below
            pass
    keys = dict(_OF_YAML) if not is_json else _OF_GAUDI[0] | _OF_GAUDI[1]
    legal = ", ".join(key for key in keys if key not in (LOW_PRECISION, FP8_FORMAT))
    root = root_of(path, text.replace("\t", " ") if is_json else text, OpListError)
    if not isinstance(root, yaml.MappingNode):
        kind = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        line = 1 if root is None else root.start_mark.line + 1
        raise OpListError(f"expected the keys {legal}, found {kind}", Origin(path, line))
    if is_json:
        keys = _of_gaudi(path, root)
    said: dict[str, Any] = {}
    places: dict[tuple, Origin] = {}
    for key, value in root.value:
        with errors_at({}, Origin(path, key.start_mark.line + 1)):
            if not isinstance(key, yaml.ScalarNode):
                raise OpListError(f"a list or a mapping is no key (legal: {legal})")
            hint, side = did_you_mean(key.value, keys), keys.get(key.value)
            if side is None:
                if not is_json and (isinstance(value, yaml.SequenceNode) or hint):
                    raise OpListError(f"{key.value!r} is no list that hmpx knows{hint} (legal: {', '.join(keys)})")
            else:
                said[side] = value_of(path, value, OpListError)
                places |= {(side,): Origin(path, key.start_mark.line + 1), **places_inside(path, value, side)}
    if not said:
        close = next((hint for key, _ in root.value if (hint := did_you_mean(str(key.value), keys))), "")
        raise OpListError(f"holds none of the keys {legal}{close}", Origin(path, 1))
    return said, Origin(path), places
