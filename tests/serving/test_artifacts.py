"""Engines on disk: built once, whoever asks, and again when they are no good."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.artifacts import obtain


class Maker:
    """Counts its builds."""

    def __init__(self, text: str = "engine") -> None:
        self.text, self.builds = text, 0

    def build(self, path: Path) -> None:
        self.builds += 1
        path.write_text(self.text)

    def obtain(self, folder: Path, **key: object) -> str:
        return obtain("thing.bin", key, self.build, Path.read_text, folder=folder)


def test_built_once_for_a_key(tmp_path: Path) -> None:
    """The same key finds it, another builds its own."""
    maker = Maker()
    assert [maker.obtain(tmp_path, version=v) for v in (1, 1, 2, 1)] == ["engine"] * 4
    assert maker.builds == 2


def test_changed_bytes_are_built_again(tmp_path: Path) -> None:
    """A half-written or rotten file never reaches a runtime."""
    maker = Maker()
    maker.obtain(tmp_path)
    (path,) = tmp_path.glob("thing-*.bin")
    path.write_text("engin")
    assert maker.obtain(tmp_path) == "engine"
    assert maker.builds == 2


def test_a_file_that_is_refused_is_built_again_once(tmp_path: Path) -> None:
    """As after an update of the runtime that its version does not show."""
    maker, refusals = Maker(), [True]

    def opens(path: Path) -> str:
        if refusals and maker.builds == 1:
            refusals.clear()
            raise RuntimeError("made by another version")
        return path.read_text()

    obtain("thing.bin", {}, maker.build, Path.read_text, folder=tmp_path)
    assert obtain("thing.bin", {}, maker.build, opens, folder=tmp_path) == "engine"
    assert maker.builds == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """The next process starts afresh."""

    def fails(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        obtain("thing.bin", {}, fails, Path.read_text, folder=tmp_path)
    assert list(tmp_path.glob("*.bin")) == []
    assert Maker().obtain(tmp_path) == "engine"
