"""Our tables, beside Optuna's in the same database. JSON columns hold no NaN and no infinity."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, ForeignKey, LargeBinary, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Base(DeclarativeBase):
    """The metadata of all our tables."""

    type_annotation_map = {dict[str, Any]: JSON, datetime: DateTime(timezone=True)}  # noqa: RUF012


class SchemaRow(Base):
    __tablename__ = "tuner_schema"

    version: Mapped[int] = mapped_column(primary_key=True)


class StudyRow(Base):
    __tablename__ = "tuner_studies"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_utc: Mapped[datetime]
    settings: Mapped[dict[str, Any]]
    fingerprint: Mapped[dict[str, Any]]
    target_rate_rps: Mapped[float]
    ceiling_rps: Mapped[float]


class TrialRow(Base):
    __tablename__ = "tuner_trials"
    __table_args__ = (UniqueConstraint("study_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("tuner_studies.id", ondelete="CASCADE"))
    number: Mapped[int]
    recorded_utc: Mapped[datetime]
    status: Mapped[str]
    origin: Mapped[str]
    reason: Mapped[str]
    feasible: Mapped[bool]
    configuration: Mapped[dict[str, Any]]
    capacity_rps: Mapped[float]
    capacity_bound_rps: Mapped[float | None]  # None: no rate missed the budget
    outcome_values: Mapped[dict[str, Any]]
    constraints: Mapped[dict[str, Any]]
    prediction: Mapped[dict[str, Any]]
    timings_s: Mapped[dict[str, Any]]
    log_tail: Mapped[str]
    measurements: Mapped[list[MeasurementRow]] = relationship(
        order_by="MeasurementRow.ordinal", cascade="all, delete-orphan", passive_deletes=True
    )


class MeasurementRow(Base):
    __tablename__ = "tuner_measurements"
    __table_args__ = (UniqueConstraint("trial_id", "ordinal"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("tuner_trials.id", ondelete="CASCADE"))
    ordinal: Mapped[int]
    phase: Mapped[str]
    rate_rps: Mapped[float]
    seed: Mapped[int]
    arrivals: Mapped[str]
    duration_s: Mapped[float]
    verdict: Mapped[str]
    p99_ms: Mapped[float | None]  # None: not finite, see judgement
    goodput_rps: Mapped[float]
    judgement: Mapped[dict[str, Any]]
    errors: Mapped[dict[str, Any]]
    certificate: Mapped[dict[str, Any]]
    work: Mapped[dict[str, Any]]
    device: Mapped[dict[str, Any]]
    latencies: Mapped[bytes] = mapped_column(LargeBinary)  # zlib of float32, ms, schedule order


class CalibrationRow(Base):
    __tablename__ = "tuner_calibrations"

    key: Mapped[str] = mapped_column(primary_key=True)
    recorded_utc: Mapped[datetime]
    document: Mapped[dict[str, Any]]


class ResultRow(Base):
    __tablename__ = "tuner_results"

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("tuner_studies.id", ondelete="CASCADE"))
    recorded_utc: Mapped[datetime]
    document: Mapped[dict[str, Any]]
