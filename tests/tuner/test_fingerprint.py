"""The environment's fingerprint."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tuner import fingerprint


def described(**changed: Any) -> dict[str, Any]:
    """What a server says of itself."""
    return {
        "server": {"name": "serving", "version": "0.1.0"},
        "devices": [
            {"id": "cpu", "name": "A CPU", "memory_bytes": 1000},
            {"id": "cuda:0", "name": "A GPU", "memory_bytes": 80 << 30},
        ],
        "model": {"name": "resnet50", "sha256": "ab", "parameters": 25},
        "versions": {"torch": "2.14.1", "cuda": "13.0"},
        **changed,
    }


class TestTake:
    """Taking it."""

    def test_says_where_it_was_taken(self) -> None:
        """Host, libraries and the server's own account are all in it."""
        taken = fingerprint.take(described())
        assert taken["cores"] >= 1
        assert taken["memory_bytes"] > 0
        assert taken["libraries"]["numpy"] == np.__version__
        assert taken["model"]["sha256"] == "ab"
        assert taken["devices"]["cuda:0"] == {"name": "A GPU", "memory_bytes": 80 << 30}

    def test_is_json(self) -> None:
        """It survives a JSON round trip unchanged."""
        taken = fingerprint.take(described())
        assert json.loads(json.dumps(taken)) == taken

    def test_free_memory_of_the_host_is_no_part_of_it(self) -> None:
        """What changes from minute to minute does not make another environment."""
        later = described(devices=[{"id": "cpu", "name": "A CPU", "memory_bytes": 999}])
        assert fingerprint.take(later)["devices"] == {"cpu": {"name": "A CPU"}}

    def test_library_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A missing library is None."""
        monkeypatch.setattr(fingerprint, "LIBRARIES", ("no-such-library",))
        assert fingerprint.take(described())["libraries"] == {"no-such-library": None}

    @pytest.mark.slow
    def test_the_reference_server_twice(self) -> None:
        """The same machine and server have the same fingerprint."""
        command = [sys.executable, "-m", "serving", "--describe"]
        first, second = (
            fingerprint.take(json.loads(subprocess.check_output(command))) for _ in range(2)
        )
        assert fingerprint.difference(first, second) == []


class TestDifference:
    """Comparing two."""

    def test_equal(self) -> None:
        """Nothing to say of equal fingerprints."""
        assert fingerprint.difference({"a": {"b": 1}}, {"a": {"b": 1}}) == []

    def test_names_what_changed(self) -> None:
        """Each change is one line with its path, the old and the new value."""
        old = {"cpu": "A", "versions": {"torch": "2.13", "cuda": "13.0"}, "governor": None}
        new = {"cpu": "A", "versions": {"torch": "2.14", "cuda": "13.0"}, "system": "Linux"}
        assert fingerprint.difference(old, new) == [
            "system: None -> Linux",
            "versions.torch: 2.13 -> 2.14",
        ]


class TestDigest:
    """Short names."""

    def test_order_does_not_matter(self) -> None:
        """Equal documents have equal digests, whatever the order of their keys."""
        assert fingerprint.digest({"a": 1, "b": 2}) == fingerprint.digest({"b": 2, "a": 1})

    def test_content_matters(self) -> None:
        """Different documents have different digests."""
        assert fingerprint.digest({"a": 1}) != fingerprint.digest({"a": 1.5})


@pytest.mark.parametrize(
    ("proc_stat", "percent"),
    [("cpu  60 0 20 10 0 0 0 10 0 0\ncpu0 1", 10), ("cpu 1 2 3 4", None), ("", None)],
)
def test_stolen_time(proc_stat: str, percent: int | None) -> None:
    """The hypervisor's share is read where the kernel tells it."""
    assert fingerprint.stolen_percent(proc_stat) == percent
