"""Study files: shipped ones load, mistakes name file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.data import shipped
from tuner.errors import UsageError
from tuner.studyfile import StudyFile

SHIPPED = sorted(f.name for f in shipped("studies").iterdir() if f.name.endswith(".yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_load(name: str) -> None:
    """Each by its name, with a budget."""
    assert "p99_budget" in StudyFile.load(name.removesuffix(".yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_budget: 100ms\np99_bugdet: 1s\n", r"my.yaml:2: p99_bugdet is not.*p99_budget\?"),
        ("trials: many\n", r"my.yaml:1: trials: .*integer.*--trials"),
        ("- 1\n", r"holds no mapping"),
        ("trials: [\n", r"not YAML"),
    ],
)
def test_mistakes_have_one_message(tmp_path: Path, text: str, message: str) -> None:
    """File and line, what was given, what is allowed."""
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        StudyFile.load(str(path))
