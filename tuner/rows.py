"""Between trials and their rows in the database, without loss."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tuner.configuration import Configuration
from tuner.measurement import (
    Certificate,
    DeviceUsage,
    Measurement,
    Prediction,
    ServerWork,
    Status,
    TrialResult,
)
from tuner.tables import MeasurementRow, StudyRow, TrialRow
from tuner.verdict import Outcome, Verdict


@dataclass(frozen=True)
class StudyRecord:
    """A study: what makes its trials comparable, and on what ground it stands."""

    name: str
    settings: dict[str, Any]
    fingerprint: dict[str, Any]
    target_rate_rps: float
    ceiling_rps: float


def study_record(row: StudyRow) -> StudyRecord:
    return StudyRecord(
        row.name, row.settings, row.fingerprint, row.target_rate_rps, row.ceiling_rps
    )


def trial_row(study_id: int, number: int, result: TrialResult) -> TrialRow:
    bound = result.capacity_bound_rps
    return TrialRow(
        study_id=study_id,
        number=number,
        recorded_utc=now(),
        status=str(result.status),
        origin=result.origin,
        reason=result.reason,
        feasible=result.feasible,
        configuration=dict(result.configuration),
        capacity_rps=result.capacity_rps,
        capacity_bound_rps=bound if math.isfinite(bound) else None,
        outcome_values=_encoded(result.values),
        constraints=_encoded(result.constraints),
        prediction=_encoded(asdict(result.prediction) if result.prediction else {}),
        timings_s=_encoded(result.timings_s),
        log_tail=result.log_tail.replace("\x00", ""),  # PostgreSQL's text holds no NUL
        measurements=[_measurement_row(i, m) for i, m in enumerate(result.measurements)],
    )


def trial_result(row: TrialRow) -> TrialResult:
    prediction = _decoded(row.prediction)
    return TrialResult(
        configuration=Configuration.of(row.configuration),
        origin=row.origin,
        status=Status(row.status),
        reason=row.reason,
        measurements=tuple(_measurement(m) for m in row.measurements),
        capacity_rps=row.capacity_rps,
        capacity_bound_rps=math.inf if row.capacity_bound_rps is None else row.capacity_bound_rps,
        values=_decoded(row.outcome_values),
        constraints=_decoded(row.constraints),
        prediction=Prediction(**prediction) if prediction else None,
        timings_s=_decoded(row.timings_s),
        log_tail=row.log_tail,
    )


def _measurement_row(ordinal: int, m: Measurement) -> MeasurementRow:
    p99_ms = m.verdict.p99_ms
    return MeasurementRow(
        ordinal=ordinal,
        phase=m.phase,
        rate_rps=m.rate_rps,
        seed=m.seed,
        arrivals=m.arrivals,
        duration_s=m.duration_s,
        verdict=str(m.verdict.outcome),
        p99_ms=p99_ms if math.isfinite(p99_ms) else None,
        goodput_rps=m.goodput_rps,
        judgement=_encoded(asdict(m.verdict)),
        errors=dict(m.errors),
        certificate=_encoded(asdict(m.certificate)),
        work=_encoded(asdict(m.work)),
        device=_encoded(asdict(m.device)),
        latencies=zlib.compress(m.latencies_ms.astype("<f4").tobytes()),
    )


def _measurement(row: MeasurementRow) -> Measurement:
    judgement, work, device = (_decoded(d) for d in (row.judgement, row.work, row.device))
    work["batch_sizes"] = {int(size): n for size, n in work["batch_sizes"].items()}
    device = {k: tuple(v) if isinstance(v, list) else v for k, v in device.items()}
    return Measurement(
        phase=row.phase,
        rate_rps=row.rate_rps,
        seed=row.seed,
        arrivals=row.arrivals,
        duration_s=row.duration_s,
        verdict=Verdict(**{**judgement, "outcome": Outcome(judgement["outcome"])}),
        goodput_rps=row.goodput_rps,
        errors=dict(row.errors),
        certificate=Certificate(**_decoded(row.certificate)),
        work=ServerWork(**work),
        device=DeviceUsage(**device),
        latencies_ms=np.frombuffer(zlib.decompress(row.latencies), dtype="<f4").copy(),
    )


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they are written as `{"float": "nan"}`."""
    document: dict[str, Any] = json.loads(json.dumps(dict(values), default=str), parse_constant=str)
    return {k: _wrapped(values[k], v) for k, v in document.items()}


def _wrapped(original: Any, written: Any) -> Any:
    if isinstance(original, float) and not math.isfinite(original):
        return {"float": repr(original)}
    return written


def _decoded(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: float(v["float"]) if isinstance(v, dict) and set(v) == {"float"} else v
        for k, v in document.items()
    }


def now() -> datetime:
    """The time as it is stored: UTC with its zone."""
    return datetime.now(UTC)
