"""Built engines on disk: built once, found again under everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from filelock import FileLock

Opened = TypeVar("Opened")


def cache_folder() -> Path:
    """`SERVING_CACHE`, or the user's cache folder."""
    named = os.environ.get("SERVING_CACHE")
    return Path(named) if named else Path(platformdirs.user_cache_dir("p99-tuner")) / "engines"


def obtain(
    kind: str,
    key: Mapping[str, Any],
    build: Callable[[Path], None],
    opens: Callable[[Path], Opened],
    *,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Opened:
    """Open the artifact with this key, building it first where there is none.

    A file that does not have the bytes it was written with, or that `opens` refuses, is built
    again, once. Processes that want the same artifact wait for the first one.

    Args:
        kind: the start of the file's name, and its ending after a dot.
        key: JSON-ready; model hash, device, versions, precision and whatever else matters.
        build: writes the artifact to the path it is given.
        opens: what the caller needs of the file; raises on one that cannot be used.
        say: told before something is built, for people.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    name, _, ending = kind.partition(".")
    path = folder / f"{name}-{_digest(key)}.{ending or 'bin'}"
    with FileLock(f"{path}.lock"):
        if _is_intact(path):
            try:
                return opens(path)
            except Exception as error:  # whatever a foreign runtime raises for a stale file
                print(f"serving: {path.name} is built again: {error}", file=sys.stderr)
        elif path.exists():
            print(f"serving: {path.name} is damaged and is built again", file=sys.stderr)
        say(f"building {name}, once; it is kept in {folder}")
        _build(path, key, build)
        return opens(path)


def _build(path: Path, key: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    """Write beside the place and rename: a reader sees the whole file or none."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as scratch:
        fresh = Path(scratch) / path.name
        build(fresh)
        note = Path(scratch) / "note"
        note.write_text(json.dumps({"key": dict(key), "sha256": _sha256(fresh)}, default=str))
        _note(path).unlink(missing_ok=True)
        fresh.replace(path)
        note.replace(_note(path))


def _is_intact(path: Path) -> bool:
    try:
        recorded = json.loads(_note(path).read_text())["sha256"]
        return bool(recorded == _sha256(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
