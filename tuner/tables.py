"""Our tables, beside Optuna's in the same database."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    LargeBinary,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class NanAsNull(TypeDecorator[float]):
    """A float column in which NULL is NaN: SQLite stores NaN so, and here PostgreSQL does too.

    Infinity needs no help; both keep it.
    """

    impl = Float(53)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        return None if value is None or math.isnan(value) else float(value)

    def process_result_value(self, value: float | None, dialect: Dialect) -> float:
        return math.nan if value is None else value


class Utc(TypeDecorator[datetime]):
    """A time with its zone: SQLite forgets that it is UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC))


Key = Annotated[int, mapped_column(primary_key=True)]
Count = Annotated[int, mapped_column(BigInteger)]
Real = Annotated[float, mapped_column(NanAsNull, nullable=True)]
OfStudy = Annotated[int, mapped_column(ForeignKey("tuner_studies.id", ondelete="CASCADE"))]


class Base(DeclarativeBase):
    """The metadata of all our tables."""

    type_annotation_map = {dict[str, Any]: JSON, datetime: Utc}  # noqa: RUF012


class SchemaRow(Base):
    """The version of these tables, in one row."""

    __tablename__ = "tuner_schema"

    version: Mapped[Key]


class StudyRow(Base):
    """A study: what makes its trials comparable."""

    __tablename__ = "tuner_studies"

    id: Mapped[Key]
    name: Mapped[str] = mapped_column(unique=True)
    created_utc: Mapped[datetime]
    settings: Mapped[dict[str, Any]]
    fingerprint: Mapped[dict[str, Any]]
    target_rate_rps: Mapped[Real]
    ceiling_rps: Mapped[Real]


class TrialRow(Base):
    """A finished trial; its number is Optuna's."""

    __tablename__ = "tuner_trials"
    __table_args__ = (UniqueConstraint("study_id", "number"),)

    id: Mapped[Key]
    study_id: Mapped[OfStudy]
    number: Mapped[int]
    recorded_utc: Mapped[datetime]
    status: Mapped[str]
    origin: Mapped[str]
    reason: Mapped[str]
    feasible: Mapped[bool]
    configuration: Mapped[dict[str, Any]]
    capacity_rps: Mapped[Real]
    capacity_bound_rps: Mapped[Real]
    outcome_values: Mapped[dict[str, Any]]
    constraints: Mapped[dict[str, Any]]
    prediction: Mapped[dict[str, Any]]  # empty: the prior had none
    timings_s: Mapped[dict[str, Any]]
    log_tail: Mapped[str]
    measurements: Mapped[list[MeasurementRow]] = relationship(
        order_by="MeasurementRow.ordinal", cascade="all, delete-orphan", passive_deletes=True
    )


class MeasurementRow(Base):
    """One phase of a trial, with its verdict from `outcome` to `evidence`."""

    __tablename__ = "tuner_measurements"
    __table_args__ = (UniqueConstraint("trial_id", "ordinal"),)

    id: Mapped[Key]
    trial_id: Mapped[int] = mapped_column(ForeignKey("tuner_trials.id", ondelete="CASCADE"))
    ordinal: Mapped[int]
    phase: Mapped[str]
    rate_rps: Mapped[Real]
    seed: Mapped[Count]
    arrivals: Mapped[str]
    duration_s: Mapped[Real]
    outcome: Mapped[str]
    budget_ms: Mapped[Real]
    confidence: Mapped[Real]
    requests: Mapped[Count]
    violations: Mapped[Count]
    effective_requests: Mapped[Real]
    p50_ms: Mapped[Real]
    p95_ms: Mapped[Real]
    p99_ms: Mapped[Real]
    p99_low_ms: Mapped[Real]
    p99_high_ms: Mapped[Real]
    evidence: Mapped[dict[str, Any]]
    goodput_rps: Mapped[Real]
    errors: Mapped[dict[str, Any]]
    certificate: Mapped[dict[str, Any]]
    work: Mapped[dict[str, Any]]
    device: Mapped[dict[str, Any]]
    latencies: Mapped[bytes] = mapped_column(LargeBinary)  # zlib of float32, ms, schedule order


class CalibrationRow(Base):
    """A calibration, under a digest of all that it depends on."""

    __tablename__ = "tuner_calibrations"

    key: Mapped[str] = mapped_column(primary_key=True)
    recorded_utc: Mapped[datetime]
    document: Mapped[dict[str, Any]]


class ResultRow(Base):
    """The report of one finished run."""

    __tablename__ = "tuner_results"

    id: Mapped[Key]
    study_id: Mapped[OfStudy]
    recorded_utc: Mapped[datetime]
    document: Mapped[dict[str, Any]]
