"""The database: Optuna's tables through its own API, and ours beside them, prefixed `tuner_`.

A trial is one transaction: it is there whole or not at all, whatever dies. SQLite runs in WAL mode;
there `synchronous=NORMAL` can lose the last transactions in a power cut but never in the death of
a process, and never corrupts the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock
from sqlalchemy import Engine, delete, func, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, selectinload

from tuner.database import connect_args, database_url, explained, is_file, open_engine, printable
from tuner.errors import UsageError
from tuner.measurement import TrialResult
from tuner.rows import StudyRecord, now, study_record, trial_result, trial_row
from tuner.tables import Base, CalibrationRow, ResultRow, SchemaRow, StudyRow, TrialRow

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

# 1 was never released: it kept verdicts in one JSON column.
SCHEMA_VERSION = 2
# PostgreSQL's advisory locks are numbers that programs agree on; this one spells "p99t".
SET_UP_LOCK = select(func.pg_advisory_xact_lock(0x70393974))


class Store:
    """Studies, trials, calibrations and reports in one database. Use `Store.open`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._optuna: list[RDBStorage] = []

    @classmethod
    def open(cls, storage: str) -> Store:
        """Open or create a database.

        Args:
            storage: a SQLite file, or a URL of SQLite or PostgreSQL.

        Raises:
            UsageError: it cannot be used; the message says why and never shows a password.
        """
        store = cls(open_engine(database_url(storage)))
        try:
            store._set_up()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        for storage in self._optuna:
            storage.remove_session()
            storage.engine.dispose()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def optuna_storage(self) -> RDBStorage:
        """Optuna's own storage in the same database; closed with the store."""
        from optuna.storages import RDBStorage

        url = self._engine.url
        text_url = url.render_as_string(hide_password=False)
        try:
            with self._alone():
                storage = RDBStorage(
                    text_url.replace("{", "{{").replace("}", "}}"),  # Optuna's is a format string
                    engine_kwargs={"connect_args": connect_args(url)},
                )
        except (DBAPIError, OSError) as error:
            raise explained(error, url) from error
        self._optuna.append(storage)
        return storage

    def save_study(self, record: StudyRecord) -> None:
        """Record a new study.

        Raises:
            UsageError: there is one of this name.
        """
        with self._session(write=True) as session:
            session.add(StudyRow(created_utc=now(), **asdict(record)))
            try:
                session.flush()
            except IntegrityError as error:
                raise UsageError(
                    f"--study-name: {record.name!r} exists already.",
                    hint="Run the same command again to continue it, or choose another name.",
                ) from error

    def study(self, name: str) -> StudyRecord | None:
        with self._session() as session:
            row = session.scalars(select(StudyRow).where(StudyRow.name == name)).one_or_none()
            return None if row is None else study_record(row)

    def studies(self) -> list[StudyRecord]:
        """Every study, the one that was last worked on last."""
        with self._session() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.id)).all()
            last = {row.id: row.created_utc for row in rows}
            for table in (TrialRow, ResultRow):
                newest = select(table.study_id, func.max(table.recorded_utc))
                for study_id, recorded in session.execute(newest.group_by(table.study_id)):
                    last[study_id] = max(last[study_id], recorded)
            return [study_record(row) for row in sorted(rows, key=lambda row: last[row.id])]

    def save_trial(self, study: str, number: int, result: TrialResult) -> None:
        """Record a finished trial, whole or not at all; the same number replaces itself."""
        with self._session(write=True) as session:
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
        with self._session() as session:
            return [(row.number, trial_result(row)) for row in session.scalars(query)]

    def save_result(self, study: str, document: Mapping[str, Any]) -> None:
        """Append the report of a finished run."""
        with self._session(write=True) as session:
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
        with self._session() as session:
            return list(session.scalars(query))

    def save_calibration(self, key: str, document: Mapping[str, Any]) -> None:
        """Keep a calibration; the same key replaces itself."""
        with self._session(write=True) as session:
            session.merge(CalibrationRow(key=key, recorded_utc=now(), document=dict(document)))

    def calibration(self, key: str) -> dict[str, Any] | None:
        with self._session() as session:
            row = session.get(CalibrationRow, key)
            return None if row is None else dict(row.document)

    @contextmanager
    def _session(self, *, write: bool = False) -> Iterator[Session]:
        """One transaction; what the database objects to becomes a `UsageError`."""
        try:
            with Session(self._engine) as session, session.begin():
                if write and self._engine.dialect.name == "sqlite":
                    # Python's sqlite3 begins late and leaves table creation out. A transaction that
                    # reads first and writes later is refused as "locked" at once, without waiting,
                    # when somebody else wrote in between.
                    session.execute(text("BEGIN IMMEDIATE"))
                yield session
        except DBAPIError as error:
            raise explained(error, self._engine.url) from error

    def _study_id(self, session: Session, name: str) -> int:
        return session.scalars(select(StudyRow.id).where(StudyRow.name == name)).one()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else creates tables meanwhile: Optuna fails when two processes do it at once."""
        if self._engine.dialect.name == "postgresql":
            with self._session() as session:
                session.execute(SET_UP_LOCK)
                yield
        elif is_file(self._engine.url):
            with FileLock(f"{self._engine.url.database}.lock"):
                yield
        else:
            yield

    def _set_up(self) -> None:
        """Create our tables, or check that they are of the version we know."""
        with self._session(write=True) as session:
            connection = session.connection()
            if connection.dialect.name == "postgresql":
                session.execute(SET_UP_LOCK)
            if not inspect(connection).has_table(SchemaRow.__tablename__):
                Base.metadata.create_all(connection)
                session.add(SchemaRow(version=SCHEMA_VERSION))
                return
            version = session.scalars(select(SchemaRow.version)).one()
            # Changes nothing, but a database that is read-only says so now, not after a trial.
            session.execute(update(SchemaRow).values(version=version))
        if version != SCHEMA_VERSION:
            age, what = ("newer", "Upgrade the tuner") if version > SCHEMA_VERSION else (
                "older", "Move it away")  # fmt: skip
            raise UsageError(
                f"--storage: {printable(self._engine.url)} was written by a tuner that is {age} "
                f"(its tables have version {version}, this one knows {SCHEMA_VERSION}).",
                hint=f"{what}, or choose another --storage.",
            )
