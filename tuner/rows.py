"""Between trials and their rows in the database, without loss."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, fields
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
from tuner.verdict import Evidence, Outcome, Verdict


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
    return TrialRow(
        study_id=study_id,
        number=number,
        recorded_utc=now(),
        status=result.status.value,
        origin=result.origin,
        reason=_storable(result.reason),
        feasible=result.feasible,
        configuration=dict(result.configuration),
        capacity_rps=result.capacity_rps,
        capacity_bound_rps=result.capacity_bound_rps,
        outcome_values=result.values,
        constraints=result.constraints,
        prediction=asdict(result.prediction) if result.prediction else {},
        timings_s=result.timings_s,
        log_tail=_storable(result.log_tail),
        measurements=[_measurement_row(i, m) for i, m in enumerate(result.measurements)],
    )


def trial_result(row: TrialRow) -> TrialResult:
    return TrialResult(
        configuration=Configuration.of(row.configuration),
        origin=row.origin,
        status=Status(row.status),
        reason=row.reason,
        measurements=tuple(_measurement(m) for m in row.measurements),
        capacity_rps=row.capacity_rps,
        capacity_bound_rps=row.capacity_bound_rps,
        values=row.outcome_values,
        constraints=row.constraints,
        prediction=Prediction(**row.prediction) if row.prediction else None,
        timings_s=row.timings_s,
        log_tail=row.log_tail,
    )


def _measurement_row(ordinal: int, m: Measurement) -> MeasurementRow:
    return MeasurementRow(
        ordinal=ordinal,
        phase=m.phase,
        rate_rps=m.rate_rps,
        seed=m.seed,
        arrivals=m.arrivals,
        duration_s=m.duration_s,
        **{**asdict(m.verdict), "outcome": m.verdict.outcome.value},
        goodput_rps=m.goodput_rps,
        errors=m.errors,
        certificate=asdict(m.certificate),
        work=asdict(m.work),
        device=asdict(m.device),
        latencies=zlib.compress(m.latencies_ms.astype("<f4").tobytes()),
    )


def _measurement(row: MeasurementRow) -> Measurement:
    judged = {field.name: getattr(row, field.name) for field in fields(Verdict)}
    sizes = {int(size): count for size, count in row.work["batch_sizes"].items()}
    device: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in row.device.items()
    }
    return Measurement(
        phase=row.phase,
        rate_rps=row.rate_rps,
        seed=row.seed,
        arrivals=row.arrivals,
        duration_s=row.duration_s,
        verdict=Verdict(
            **{**judged, "outcome": Outcome(row.outcome), "evidence": Evidence(**row.evidence)}
        ),
        goodput_rps=row.goodput_rps,
        errors=row.errors,
        certificate=Certificate(**row.certificate),
        work=ServerWork(**{**row.work, "batch_sizes": sizes}),
        device=DeviceUsage(**device),
        latencies_ms=np.frombuffer(zlib.decompress(row.latencies), dtype="<f4").copy(),
    )


def _storable(text: str) -> str:
    """Text that both databases take: no NUL (PostgreSQL), no lone surrogates (both)."""
    return text.replace("\x00", "").encode(errors="replace").decode()


def now() -> datetime:
    """The time as it is stored: UTC with its zone."""
    return datetime.now(UTC)
