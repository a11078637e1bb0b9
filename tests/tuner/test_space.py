"""Search spaces: shipped ones load, mistakes name file, line and remedy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.data import shipped
from tuner.errors import UsageError
from tuner.space import Choice, FloatRange, IntRange, Space


def space(folder: Path, parameters: str) -> Space:
    path = folder / "mine.yaml"
    path.write_text(f"parameters:\n{parameters}")
    return Space.load(str(path), cores=4)


SHIPPED = sorted(f.name.removesuffix(".yaml") for f in shipped("search_spaces").iterdir()
                 if f.name.endswith(".yaml"))  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_spaces_load(name: str) -> None:
    """Each by its name, finite, with a point in it."""
    loaded = Space.load(name, cores=2)
    assert loaded.name == name
    size = loaded.size()
    assert size is not None
    assert size == len(list(loaded.grid())) if size < 5000 else size > 0
    assert loaded.contains(loaded.nearest({}))


def test_reads_every_kind(tmp_path: Path) -> None:
    """Ranges of both kinds, choices, and the word `cores`."""
    loaded = space(
        tmp_path,
        "  batch_window_ms: {low: 0, high: 10, step: 2.5}\n"
        "  workers: {low: 1, high: cores}\n"
        "  precision: {values: [fp32, bf16]}\n",
    )
    assert loaded.parameters == {
        "batch_window_ms": FloatRange(0.0, 10.0, 2.5),
        "workers": IntRange(1, 4),
        "precision": Choice(("fp32", "bf16")),
    }
    assert loaded.values("batch_window_ms") == (0.0, 2.5, 5.0, 7.5, 10.0)
    assert loaded.size() == 5 * 4 * 2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("  max_batch_sze: {low: 1, high: 4}\n",
         r"mine.yaml:2: max_batch_sze is not a parameter of this server.*max_batch_size\?"),
        ("  workers: {low: 1, high: 2}\n  instances: {low: 4, high: 2}\n",
         r"mine.yaml:3: instances: low 4 is above high 2"),
        ("  workers: {low: 0, high: 2}\n", r"workers: 0 is not a whole number from 1 to 256"),
        ("  workers: {values: [1.5]}\n", r"workers: 1.5 is not a whole number"),
        ("  max_batch_size: {values: [1, 1]}\n", r"a value is given twice"),
        ("  max_batch_size: {values: []}\n", r"max_batch_size: .*at least 1"),
        ("  precision: {values: [fp23]}\n", r"'fp23' is unknown.*Did you mean fp32\?"),
        ("  precision: {low: 1, high: 2}\n", r"precision is a word, not a range"),
        ("  workers: {low: 1}\n", r"workers: field required"),
        ("  workers: {low: 1, high: 2, hihg: 3}\n", r"workers: extra inputs"),
        ("  workers: 3\n", r"workers: .*given 3"),
        ("  workers: {low: 1, high: 2}\n  workers: {low: 1, high: 3}\n", r"mine.yaml:3: not YAML"),
        ("  batch_window_ms: {low: 0, high: 5, log: true}\n", r"log needs a low above 0"),
        ("", r"no parameters"),
    ],
)  # fmt: skip
def test_mistakes_have_one_message(tmp_path: Path, parameters: str, message: str) -> None:
    """File and line, what was given, what is allowed."""
    with pytest.raises(UsageError, match=message) as caught:
        space(tmp_path, parameters)
    assert caught.value.exit_code == 2


def test_an_unknown_name_offers_the_closest() -> None:
    """`--space smal` finds `small`."""
    with pytest.raises(UsageError, match=r"--space: 'smal' is neither.*Did you mean small\?"):
        Space.load("smal", cores=2)


def test_what_the_device_cannot_do_is_left_out_with_a_note(tmp_path: Path) -> None:
    """The rest stays; a parameter without a value left is an error."""
    loaded = space(tmp_path, "  precision: {values: [fp32, fp16]}\n")
    offered = {"precision": {"fp32": None, "fp16": "needs a GPU"}}
    kept, notes = loaded.restricted(offered)
    assert kept.values("precision") == ("fp32",)
    assert notes == ("precision fp16: needs a GPU",)
    with pytest.raises(UsageError, match="nothing is left of precision"):
        loaded.restricted({"precision": {"fp32": "no", "fp16": "no"}})


def test_capping_keeps_what_fits(tmp_path: Path) -> None:
    """Values above the cap go; the cap itself replaces an empty rest."""
    loaded = space(tmp_path, "  instances: {low: 2, high: 4}\n")
    assert loaded.capped("instances", 3).values("instances") == (2, 3)
    assert loaded.capped("instances", 1).values("instances") == (1,)


@given(seed=st.integers(0, 1000), window=st.floats(-5, 50), batch=st.integers(0, 100))
def test_samples_and_nearest_points_are_inside(seed: int, window: float, batch: int) -> None:
    """Whatever is drawn or snapped belongs to the space."""
    loaded = Space.load("default", cores=2)
    assert loaded.contains(loaded.sample(random.Random(seed)))
    nearest = loaded.nearest({"batch_window_ms": window, "max_batch_size": batch})
    assert loaded.contains(nearest)
    assert not loaded.contains({**nearest, "precision": "fp64"})
