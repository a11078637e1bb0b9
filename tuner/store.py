"""The database: Optuna's tables through its own API, and ours beside them, prefixed `tuner_`.

A trial is one transaction: it is there whole or not at all, whatever dies. SQLite runs in WAL mode;
there `synchronous=NORMAL` can lose the last transactions in a power cut but never in the death of
a process, and never corrupts the file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Engine, create_engine, delete, event, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session, selectinload

from tuner.errors import UsageError
from tuner.measurement import TrialResult
from tuner.rows import StudyRecord, now, study_record, trial_result, trial_row
from tuner.tables import Base, CalibrationRow, ResultRow, SchemaRow, StudyRow, TrialRow

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

SCHEMA_VERSION = 1
# How long a writer waits for another one before SQLite gives up.
BUSY_TIMEOUT_MS = 30_000


class Store:
    """Studies, trials, calibrations and reports in one database. Use `Store.open`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, storage: str) -> Store:
        """Open or create a database.

        Args:
            storage: a SQLite file, or a URL of SQLite or PostgreSQL.

        Raises:
            UsageError: it cannot be used; the message says why and never shows a password.
        """
        url = database_url(storage)
        try:
            engine = _engine(url)
            _prepare(engine, url)
        except (DBAPIError, NoSuchModuleError, ModuleNotFoundError, OSError) as error:
            raise _explained(error, url) from error
        return cls(engine)

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def optuna_storage(self) -> RDBStorage:
        """Optuna's own storage in the same database."""
        from optuna.storages import RDBStorage

        url = self._engine.url.render_as_string(hide_password=False)
        wait = {"timeout": BUSY_TIMEOUT_MS / 1000} if self._engine.dialect.name == "sqlite" else {}
        return RDBStorage(url, engine_kwargs={"connect_args": wait})

    def save_study(self, record: StudyRecord) -> None:
        with Session(self._engine) as session, session.begin():
            session.add(StudyRow(created_utc=now(), **asdict(record)))

    def study(self, name: str) -> StudyRecord | None:
        return next((s for s in self.studies() if s.name == name), None)

    def studies(self) -> list[StudyRecord]:
        """Every study, the one that was last worked on last."""
        with Session(self._engine) as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.id)).all()
            last = {row.id: row.created_utc for row in rows}
            for table in (TrialRow, ResultRow):
                for study_id, recorded in session.execute(
                    select(table.study_id, table.recorded_utc)
                ):
                    last[study_id] = max(last[study_id], recorded)
            return [study_record(row) for row in sorted(rows, key=lambda row: last[row.id])]

    def save_trial(self, study: str, number: int, result: TrialResult) -> None:
        """Record a finished trial, whole or not at all; the same number replaces itself."""
        with Session(self._engine) as session, session.begin():
            study_id = self._study_id(session, study)
            session.execute(
                delete(TrialRow).where(TrialRow.study_id == study_id, TrialRow.number == number)
            )
            session.add(trial_row(study_id, number, result))

    def trials(self, study: str) -> list[tuple[int, TrialResult]]:
        """Every recorded trial of a study with its number, in order."""
        query = (
            select(TrialRow)
            .join(StudyRow, StudyRow.id == TrialRow.study_id)
            .where(StudyRow.name == study)
            .order_by(TrialRow.number)
            .options(selectinload(TrialRow.measurements))
        )
        with Session(self._engine) as session:
            return [(row.number, trial_result(row)) for row in session.scalars(query)]

    def save_result(self, study: str, document: Mapping[str, Any]) -> None:
        """Append the report of a finished run."""
        with Session(self._engine) as session, session.begin():
            study_id = self._study_id(session, study)
            session.add(ResultRow(study_id=study_id, recorded_utc=now(), document=dict(document)))

    def results(self, study: str) -> list[dict[str, Any]]:
        """The reports of a study's finished runs, oldest first."""
        query = (
            select(ResultRow.document)
            .join(StudyRow, StudyRow.id == ResultRow.study_id)
            .where(StudyRow.name == study)
            .order_by(ResultRow.id)
        )
        with Session(self._engine) as session:
            return list(session.scalars(query))

    def save_calibration(self, key: str, document: Mapping[str, Any]) -> None:
        with Session(self._engine) as session, session.begin():
            session.merge(CalibrationRow(key=key, recorded_utc=now(), document=dict(document)))

    def calibration(self, key: str) -> dict[str, Any] | None:
        with Session(self._engine) as session:
            row = session.get(CalibrationRow, key)
            return None if row is None else dict(row.document)

    def _study_id(self, session: Session, name: str) -> int:
        return session.scalars(select(StudyRow.id).where(StudyRow.name == name)).one()


def database_url(storage: str) -> URL:
    """The URL of `--storage`: a plain path is a SQLite file, `postgresql://` uses psycopg 3.

    Raises:
        UsageError: neither a path nor a URL of a known database.
    """
    if "://" not in storage:
        return URL.create("sqlite", database=storage)
    try:
        url = make_url(storage)
    except ArgumentError as error:
        raise UsageError("--storage: not a database URL.", hint=_URL_HINT) from error
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise UsageError(f"--storage: {url.drivername} is not supported.", hint=_URL_HINT)
    return url


_URL_HINT = "Give a file such as studies/tuner.db, or postgresql://user@host/database."


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _: object) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _prepare(engine: Engine, url: URL) -> None:
    """Create our tables, or check that they are of a version we know."""
    if "tuner_schema" not in inspect(engine).get_table_names():
        Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        row = session.scalars(select(SchemaRow)).one_or_none()
        if row is None:
            session.add(SchemaRow(version=SCHEMA_VERSION))
        elif row.version > SCHEMA_VERSION:
            raise UsageError(
                f"--storage: {_name(url)} was written by a newer tuner (schema {row.version}, this "
                f"one knows {SCHEMA_VERSION}).",
                hint="Upgrade the tuner, or choose another --storage.",
            )
        session.execute(delete(SchemaRow).where(SchemaRow.version < 0))  # a write: read-only shows


def _explained(error: Exception, url: URL) -> UsageError:
    """One clear message for what databases and file systems answer."""
    name, text = _name(url), str(getattr(error, "orig", None) or error)
    if isinstance(error, ModuleNotFoundError):
        return UsageError(
            f"--storage: {name} needs the package {error.name}.",
            hint="Install it: pip install 'p99-tuner[postgres]'.",
        )
    if "not a database" in text:
        return UsageError(
            f"--storage: {name} is not a SQLite database.",
            hint="Choose another --storage, or move the file away.",
        )
    if url.get_backend_name() == "sqlite":
        reason = getattr(error, "strerror", None) or text
        return UsageError(
            f"--storage: {name} cannot be written: {reason}.",
            hint="Choose a --storage in a folder that is writable.",
        )
    return UsageError(
        f"--storage: {name} cannot be reached: {text.strip().splitlines()[0]}.",
        hint="Check host, port, user and database.",
    )


def _name(url: URL) -> str:
    """The file's path, or the URL with its password hidden."""
    if url.get_backend_name() == "sqlite":
        return os.fspath(url.database or "the database in memory")
    return url.render_as_string(hide_password=True)
