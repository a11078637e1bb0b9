"""Exports: deterministic, complete, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.tuner.examples import result
from tuner.errors import UsageError
from tuner.export import export_document, to_yaml, write_atomically
from tuner.rows import StudyRecord

RECORD = StudyRecord(
    name="mobilenet-cpu-100ms",
    settings={
        "budget_ms": 100.0, "qps": 120.0, "objective": "utilization", "seed": 3, "payloads": "ab",
        "model": {"name": "mobilenet_v3_small", "sha256": "cd"},
        "base": {"model": "mobilenet_v3_small", "device": "cpu"},
    },
    fingerprint={"cpu": "some cpu"},
    target_rate_rps=120.0,
    ceiling_rps=400.0,
)  # fmt: skip


def test_the_server_section_starts_that_server() -> None:
    """Base settings and configuration together, nothing else."""
    document = export_document(RECORD, 4, result(max_batch_size=16), None)
    assert document["server"]["max_batch_size"] == 16
    assert document["server"]["model"] == "mobilenet_v3_small"


def test_reads_back_equal() -> None:
    """The YAML holds the document, floats and all."""
    document = export_document(RECORD, 4, result(), None)
    assert YAML(typ="safe", pure=True).load(to_yaml(document)) == document


def test_the_same_trial_gives_the_same_bytes() -> None:
    """A diff of two exports shows a change, never a time."""
    first, second = (to_yaml(export_document(RECORD, 4, result(), None)) for _ in range(2))
    assert first == second


def test_opens_with_its_evidence() -> None:
    """Study, trial, P99 with its interval, rate, budget and the command to repeat it."""
    opening = to_yaml(export_document(RECORD, 4, result(), None)).splitlines()[:4]
    assert all(line.startswith("# ") for line in opening)
    text = "\n".join(opening)
    for part in ("trial 4", "P99 80.0 ms (72.0 to 88.0 at 95%)", "at 100/s", "budget 100 ms",
                 "--p99-budget 100ms --qps 120"):  # fmt: skip
        assert part in text


def test_an_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    """The message names the flag, the file and what to do; nothing is left behind."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match=r"-o: .*best.yaml cannot be written"):
        write_atomically(blocked / "best.yaml", "text")


def test_replaces_whole(tmp_path: Path) -> None:
    """An existing file is replaced, and no temporary file stays."""
    path = tmp_path / "best.yaml"
    path.write_text("old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
