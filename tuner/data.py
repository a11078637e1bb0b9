"""Files that the project ships, and YAML files that users write."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError

from tuner.errors import UsageError


def shipped(kind: str) -> Traversable:
    """The shipped folder `search_spaces` or `studies`: inside the installed package, or beside the
    package in a checkout."""
    inside = files("tuner") / kind
    return inside if inside.is_dir() else Path(__file__).parent.parent / kind


def resolve(kind: str, flag: str, name: str) -> Path | Traversable:
    """A file by its path, by its name in ./KIND/, or by its shipped name.

    Raises:
        UsageError: there is none; lists the shipped names and the closest match.
    """
    for path in (Path(name), Path(kind) / f"{name}.yaml"):
        if path.is_file():
            return path
    candidate = shipped(kind) / f"{name}.yaml"
    if candidate.is_file():
        return candidate
    names = sorted(f.name.removesuffix(".yaml") for f in shipped(kind).iterdir()
                   if f.name.endswith(".yaml"))  # fmt: skip
    near = get_close_matches(name, names, n=1)
    raise UsageError(
        f"{flag}: {name!r} is neither a file nor one of {', '.join(names)}.",
        hint=f"Did you mean {near[0]}?" if near else "Give a path or one of these names.",
    )


def load_yaml(source: Path | Traversable) -> CommentedMap:
    """A YAML mapping that remembers its lines; see `where` and `plain`.

    The reader is YAML 1.2: `on` and `off` stay words, and a key given twice is an error.

    Raises:
        UsageError: unreadable, not YAML, or not a mapping; with file and line.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} cannot be read: {error}.", hint="Give a YAML file.") from error
    try:
        document = YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem).split())
        raise UsageError(f"{source}{line}: not YAML: {problem}.", hint="Mend this line.") from error
    if not isinstance(document, CommentedMap):
        raise UsageError(f"{source}: holds no mapping.", hint="Write `key: value` lines.")
    return document


def where(source: Path | Traversable, mapping: Any, key: object) -> str:
    """`FILE:LINE` of a key, for messages."""
    try:
        return f"{source}:{mapping.lc.key(key)[0] + 1}"
    except (AttributeError, KeyError):
        return str(source)


def plain(value: Any) -> Any:
    """The same data as ordinary dicts, lists, numbers and strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def closest(name: str, known: list[str]) -> str:
    """A hint for a misspelt name."""
    near = get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
