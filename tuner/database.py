"""Which database `--storage` names, how to connect to it, and what its objections mean."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from tuner.documents import dumps, loads
from tuner.errors import UsageError

# A writer waits this long for another one before SQLite gives up; ours write for milliseconds.
BUSY_TIMEOUT_S = 30
# A host that drops packets would otherwise hold the first command for minutes.
CONNECT_TIMEOUT_S = 10
DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_FORMS = "Give a file such as studies/tuner.db, or postgresql://user@host/database."


def database_url(storage: str) -> URL:
    """The URL of `--storage`: a plain path is a SQLite file, `postgresql://` uses psycopg 3.

    Raises:
        UsageError: neither a path nor a URL of a known database.
    """
    if not storage.strip():
        raise UsageError("--storage: empty.", hint=_FORMS)
    if "://" not in storage:
        return URL.create("sqlite", database=storage)
    try:
        url = make_url(storage)
    except (ArgumentError, ValueError) as error:
        # Not shown: what cannot be parsed may hold a password.
        raise UsageError("--storage: not a database URL.", hint=_FORMS) from error
    if url.drivername not in DRIVERS:
        raise UsageError(
            f"--storage: {url.drivername}:// is not supported, only SQLite and PostgreSQL "
            "(through psycopg) are.",
            hint=_FORMS,
        )
    if url.drivername.startswith("sqlite") and url.host:
        raise UsageError(
            f"--storage: sqlite://{url.host} lacks a slash.",
            hint="Write sqlite:///relative/path or sqlite:////absolute/path.",
        )
    return url.set(drivername=DRIVERS[url.drivername])


def open_engine(url: URL) -> Engine:
    """An engine that has not connected yet; a SQLite file's folder is made.

    Raises:
        UsageError: the folder cannot be made, or the driver is not installed.
    """
    try:
        if is_file(url):
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(
            url,
            connect_args=connect_args(url),
            json_serializer=dumps,
            json_deserializer=loads,
            pool_pre_ping=_is_postgres(url),
        )
    except (ImportError, OSError) as error:
        raise explained(error, url) from error
    if not _is_postgres(url):
        event.listen(engine, "connect", _set_up_sqlite)
    return engine


def connect_args(url: URL) -> dict[str, Any]:
    """What every connection needs, ours and Optuna's, where the URL does not say otherwise."""
    wanted = {"connect_timeout": CONNECT_TIMEOUT_S} if _is_postgres(url) else {
        "timeout": BUSY_TIMEOUT_S}  # fmt: skip
    return {name: value for name, value in wanted.items() if name not in url.query}


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def explained(error: Exception, url: URL) -> UsageError:
    """One clear message for what drivers, databases and file systems answer."""
    name = printable(url)
    if isinstance(error, ImportError):
        return UsageError(
            f"--storage: {name} needs psycopg 3, which cannot be imported ({error}).",
            hint="Install it: pip install 'p99-tuner[postgres]'.",
        )
    reason = _reason(error, url)
    if "not a database" in reason:
        return UsageError(
            f"--storage: {name} is not a SQLite database.",
            hint="Choose another --storage, or move the file away.",
        )
    if _is_postgres(url):
        hint = "Check host, port, user, password and database."
    elif "locked" in reason:
        hint = "Another program is writing to it: end that one, or choose another --storage."
    else:
        hint = "Choose a --storage in a folder that is writable and has room."
    return UsageError(f"--storage: {name} cannot be used: {reason}.", hint=hint)


def _reason(error: Exception, url: URL) -> str:
    """What went wrong in one line, without the statement, the path and the password."""
    text = str(error.orig) if isinstance(error, DBAPIError) else ""
    text = text or getattr(error, "strerror", None) or str(error)
    if url.password:
        text = text.replace(str(url.password), "***")
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def printable(url: URL) -> str:
    """The file's path, or the URL without its password and its options, which may hold another."""
    if _is_postgres(url):
        return url.set(query={}).render_as_string(hide_password=True)
    return url.database or "the database in memory"


def is_file(url: URL) -> bool:
    """A SQLite file named by its path; not one in memory, not one named by a `file:` URI."""
    path = url.database
    return bool(path) and not _is_postgres(url) and not str(path).startswith((":memory:", "file:"))


def _is_postgres(url: URL) -> bool:
    return url.get_backend_name() == "postgresql"
