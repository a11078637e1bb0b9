"""The winning configuration as a file that starts that server, with its evidence."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tuner import __version__
from tuner.errors import UsageError
from tuner.measurement import TrialResult
from tuner.report import measurement_document
from tuner.rows import StudyRecord

SCHEMA_VERSION = 1
KIND = "tuner/serving-configuration"


def export_document(
    record: StudyRecord,
    number: int,
    result: TrialResult,
    confirmed: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Configuration, evidence and provenance; deterministic, without times.

    Args:
        confirmed: the finalist document of this trial from the last run, if it was one.
    """
    best = result.phase("headroom") or result.phase("target")
    evidence: dict[str, Any] = {
        "study": record.name,
        "trial": number,
        "objective": record.settings["objective"],
        "budget_ms": record.settings["budget_ms"],
        "feasible": result.feasible,
        "capacity_rps": result.capacity_rps,
        "ceiling_rps": record.ceiling_rps,
        "target": _or_none(result.phase("target")),
        "last_step": _or_none(best),
        "confirmed": confirmed,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "server": {**record.settings["base"], **result.configuration},
        "evidence": evidence,
        "provenance": {
            "tuner": __version__,
            "fingerprint": record.fingerprint,
            "payloads_sha256": record.settings["payloads"],
            "model": record.settings["model"],
            "seed": record.settings["seed"],
            "reproduce": reproduce_command(record),
        },
    }


def reproduce_command(record: StudyRecord) -> str:
    """The command that continues or repeats this study."""
    settings = record.settings
    parts = ["tuner run", f"--p99-budget {settings['budget_ms']:g}ms"]
    if settings["qps"]:
        parts.append(f"--qps {settings['qps']:g}")
    parts += [f"--objective {settings['objective']}", f"--model {settings['model']['name']}",
              f"--seed {settings['seed']}", f"--study-name {record.name}"]  # fmt: skip
    return " ".join(parts)


def headline(document: Mapping[str, Any]) -> str:
    """The comment that opens the file: what this is, on what evidence, how to use it."""
    evidence = document["evidence"]
    confirmed = evidence["confirmed"]
    target = confirmed["load"] if confirmed else evidence["target"]
    lines = [f"Study {evidence['study']}, trial {evidence['trial']}."]
    if target is not None:
        low, high = target["p99_interval_ms"]
        lines.append(
            f"Measured P99 {target['p99_ms']} ms ({low} to {high} at {target['confidence']:.0%}) "
            f"at {target['rate_rps']:g}/s, budget {evidence['budget_ms']:g} ms: "
            f"{target['verdict']}."
        )
    lines += [
        "Start it: tuner serve THIS_FILE",
        f"Reproduce: {document['provenance']['reproduce']}",
    ]
    return "".join(f"# {line}\n" for line in lines)


def to_yaml(document: Mapping[str, Any]) -> str:
    """The document as YAML with its headline; the same document gives the same bytes."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 100
    text = io.StringIO()
    yaml.dump(dict(document), text)
    return headline(document) + text.getvalue()


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file and rename, so that a reader sees the old file or the new one.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes it private; an export is for others
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(
            f"-o: {path} cannot be written: {error.strerror}.",
            hint="Choose a file in a folder that exists and is writable.",
        ) from error


def _or_none(measurement: Any) -> dict[str, Any] | None:
    return None if measurement is None else measurement_document(measurement)
