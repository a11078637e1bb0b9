"""The store, on SQLite and on PostgreSQL, and what it says of databases it cannot use."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
from sqlalchemy import create_engine, inspect, text

from tests.tuner import examples
from tuner.errors import UsageError
from tuner.measurement import DeviceUsage, Measurement, Prediction, Status, TrialResult
from tuner.rows import StudyRecord
from tuner.store import SCHEMA_VERSION, Store

STUDY = StudyRecord("resnet50", {"budget_ms": 100.0}, {"cpu": "A CPU"}, 120.0, 900.0)
MEASURED = examples.measurement()
FULL = TrialResult(
    configuration=examples.configuration(batch_window_ms=2.5),
    origin="defaults",
    status=Status.MEASURED,
    reason="met the budget",
    measurements=(
        dataclasses.replace(
            MEASURED,
            errors={"timeout": 2},
            device=DeviceUsage(
                "nvml", 0.5, (0.25, 0.75), 1 << 34, 300.0, 700.0, 1500.0, 1980.0,
                ("software power cap",), (17,), ("Other processes used the device: pid 17",),
            ),
            latencies_ms=np.array([1.5, math.nan, math.inf], dtype=np.float32),
        ),
        examples.measurement(phase="headroom", rate_rps=200.0, meets=False, busy=None),
    ),
    capacity_rps=150.0,
    capacity_bound_rps=160.0,
    values={"utilization": 0.4},
    constraints={"p99": -0.2},
    prediction=Prediction(120.0, 3.5, 1.2, 20.0, 70.0, 150.0, 0.004),
    timings_s={"start": 1.5},
    log_tail="INFO ready\nINFO äöü 🙂",
)  # fmt: skip


@pytest.fixture
def store(storage_url: str) -> Iterator[Store]:
    """An open store that holds one study."""
    with Store.open(storage_url) as opened:
        opened.save_study(STUDY)
        yield opened


def not_finite() -> TrialResult:
    """A trial in which nothing was answered: every figure that can be is NaN or infinite."""
    verdict = dataclasses.replace(
        examples.verdict(), p50_ms=math.nan, p99_ms=math.inf, p99_low_ms=-math.inf,
        p99_high_ms=math.inf,
    )  # fmt: skip
    measurement: Measurement = dataclasses.replace(
        examples.measurement(),
        verdict=verdict,
        goodput_rps=math.nan,
        certificate=dataclasses.replace(MEASURED.certificate, send_lag_p99_ms=math.nan),
    )
    return dataclasses.replace(
        FULL,
        measurements=(measurement,),
        capacity_rps=math.nan,
        capacity_bound_rps=math.inf,
        values={"efficiency": math.nan, "utilization": -math.inf},
        prediction=Prediction(120.0, 3.5, 1.2, 20.0, math.inf, 150.0, math.nan),
    )


class TestStudies:
    """Studies, reports and calibrations."""

    def test_round_trip(self, store: Store) -> None:
        """A study comes back as it was saved."""
        assert store.study(STUDY.name) == STUDY
        assert store.study("another") is None

    def test_same_name_twice(self, store: Store) -> None:
        """A name is taken once; the error says how to go on."""
        with pytest.raises(UsageError, match=r"'resnet50' exists already. Run the same command"):
            store.save_study(STUDY)

    def test_last_worked_on_is_last(self, store: Store) -> None:
        """Studies come in the order in which they were last worked on."""
        store.save_study(dataclasses.replace(STUDY, name="newer"))
        assert [s.name for s in store.studies()] == ["resnet50", "newer"]
        store.save_trial("resnet50", 0, FULL)
        assert [s.name for s in store.studies()] == ["newer", "resnet50"]
        store.save_result("newer", {})
        assert [s.name for s in store.studies()] == ["resnet50", "newer"]

    def test_results_are_appended(self, store: Store) -> None:
        """Every run's report is kept, oldest first, NaN and infinity included."""
        store.save_result(STUDY.name, {"run": 1, "p99_ms": math.inf})
        store.save_result(STUDY.name, {"run": 2, "nested": [{"p99_ms": -math.inf}]})
        assert store.results(STUDY.name) == [
            {"run": 1, "p99_ms": math.inf},
            {"run": 2, "nested": [{"p99_ms": -math.inf}]},
        ]

    def test_calibration(self, store: Store) -> None:
        """A calibration is found by its key, and replaced by a newer one."""
        assert store.calibration("key") is None
        store.save_calibration("key", {"s": [1.0, 2.0]})
        store.save_calibration("key", {"s": [3.0]})
        assert store.calibration("key") == {"s": [3.0]}


class TestTrials:
    """Trials with their measurements."""

    def test_round_trip(self, store: Store) -> None:
        """A trial comes back equal to what was saved, raw latencies too."""
        store.save_trial(STUDY.name, 0, FULL)
        ((number, read),) = store.trials(STUDY.name)
        assert (number, read) == (0, FULL)
        for was, now in zip(FULL.measurements, read.measurements, strict=True):
            np.testing.assert_array_equal(now.latencies_ms, was.latencies_ms)
            assert now.latencies_ms.dtype == was.latencies_ms.dtype

    def test_nan_and_infinity(self, store: Store) -> None:
        """NaN stays NaN and infinity stays infinite, in columns and in documents."""
        store.save_trial(STUDY.name, 0, not_finite())
        ((_, read),) = store.trials(STUDY.name)
        assert repr(read) == repr(not_finite())

    def test_without_anything(self, store: Store) -> None:
        """A trial that was not measured has no measurements and no prediction."""
        skipped = TrialResult(examples.configuration(), "prior", Status.SKIPPED, "too slow")
        store.save_trial(STUDY.name, 3, skipped)
        assert store.trials(STUDY.name) == [(3, skipped)]

    def test_numpy_numbers(self, store: Store) -> None:
        """Numpy's scalars are numbers too."""
        odd = dataclasses.replace(
            FULL, capacity_rps=np.float64(150.0), values={"utilization": np.float64(0.4)}
        )
        store.save_trial(STUDY.name, 0, odd)
        assert store.trials(STUDY.name) == [(0, FULL)]

    def test_same_number_replaces(self, store: Store) -> None:
        """Saving a trial again leaves one trial with one set of measurements."""
        store.save_trial(STUDY.name, 0, examples.result())
        store.save_trial(STUDY.name, 0, FULL)
        assert store.trials(STUDY.name) == [(0, FULL)]

    def test_order_and_studies(self, store: Store) -> None:
        """Trials come by number, each study's own."""
        store.save_study(dataclasses.replace(STUDY, name="other"))
        for number in (2, 0, 1):
            store.save_trial(STUDY.name, number, FULL)
        store.save_trial("other", 7, FULL)
        assert [number for number, _ in store.trials(STUDY.name)] == [0, 1, 2]
        assert [number for number, _ in store.trials("other")] == [7]

    def test_text_that_databases_refuse(self, store: Store) -> None:
        """A log with NUL bytes or broken Unicode does not cost the trial."""
        odd = dataclasses.replace(FULL, log_tail="a\x00b\udc80", reason="\x00")
        store.save_trial(STUDY.name, 0, odd)
        ((_, read),) = store.trials(STUDY.name)
        assert (read.log_tail, read.reason) == ("ab?", "")

    def test_large_seed(self, store: Store) -> None:
        """A seed of more than 32 bits fits."""
        big = dataclasses.replace(MEASURED, seed=2**40)
        store.save_trial(STUDY.name, 0, dataclasses.replace(FULL, measurements=(big,)))
        assert store.trials(STUDY.name)[0][1].measurements[0].seed == 2**40

    def test_survives_reopening(self, store: Store, storage_url: str) -> None:
        """Another process finds what was saved."""
        store.save_trial(STUDY.name, 0, FULL)
        with Store.open(storage_url) as again:
            assert again.trials(STUDY.name) == [(0, FULL)]


class TestBesideOptuna:
    """Optuna's tables and ours in one database."""

    def test_constraints_and_rows(self, store: Store, storage_url: str) -> None:
        """A study of Optuna's with a named constraint and our trial live side by side."""
        study = optuna.create_study(study_name=STUDY.name, storage=store.optuna_storage())
        trial = study.ask()
        trial.suggest_float("batch_window_ms", 0.0, 10.0)
        trial.set_constraint("p99", 0.25)
        study.tell(trial, 1.0)
        store.save_trial(STUDY.name, trial.number, FULL)
        with Store.open(storage_url) as again:
            read = optuna.load_study(study_name=STUDY.name, storage=again.optuna_storage())
            assert read.trials[0].constraints == {"p99": 0.25}
            assert again.trials(STUDY.name) == [(0, FULL)]

    def test_our_tables_are_prefixed(self, store: Store, storage_url: str) -> None:
        """No table of ours can collide with one of Optuna's."""
        engine = create_engine(storage_url)
        assert all(t.startswith("tuner_") for t in inspect(engine).get_table_names())
        store.optuna_storage()
        assert {"studies", "trials", "tuner_trials"} <= set(inspect(engine).get_table_names())
        engine.dispose()


def start_writer(url: str, first: int, count: int) -> subprocess.Popen[str]:
    """A process of its own that writes trials."""
    command = [sys.executable, "-m", "tests.tuner.store_writer", url, STUDY.name]
    return subprocess.Popen(
        [*command, str(first), str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
class TestProcesses:
    """Several processes, and processes that die."""

    def test_two_writers(self, store: Store, storage_url: str) -> None:
        """Two processes write at the same time, and neither finds the database locked."""
        optuna.create_study(study_name=STUDY.name, storage=store.optuna_storage())
        writers = [start_writer(storage_url, first, 25) for first in (0, 100)]
        for writer in writers:
            _, errors = writer.communicate(timeout=120)
            assert writer.returncode == 0, errors
        numbers = [number for number, _ in store.trials(STUDY.name)]
        assert numbers == [*range(25), *range(100, 125)]

    def test_first_opening_at_once(self, storage_url: str) -> None:
        """Several processes may create the same database, Optuna's tables included."""
        code = "import sys; from tuner.store import Store; Store.open(sys.argv[1]).optuna_storage()"
        openers = [
            subprocess.Popen(
                [sys.executable, "-c", code, storage_url], stderr=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        for opener in openers:
            _, errors = opener.communicate(timeout=120)
            assert opener.returncode == 0, errors

    def test_kill_9_loses_no_saved_trial(self, store: Store, storage_url: str) -> None:
        """What was saved before the process was killed is there, and whole."""
        optuna.create_study(study_name=STUDY.name, storage=store.optuna_storage())
        writer = start_writer(storage_url, 0, 100_000)
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(10)]
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate(timeout=30)
        said += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        found = store.trials(STUDY.name)
        assert [number for number, _ in found][: len(said)] == said
        assert len(found) <= len(said) + 1
        for number, result in found:
            assert result == examples.result(capacity_rps=float(number))


class TestRefusals:
    """What cannot be used is one clear message."""

    @pytest.mark.parametrize(
        ("storage", "message"),
        [
            ("", "--storage: empty. Give a file"),
            ("mysql://me:secret@host/db", "mysql:// is not supported, only SQLite and PostgreSQL"),
            ("postgresql+psycopg2://me:secret@host/db", r"postgresql\+psycopg2:// is not"),
            ("postgresql://me:secret@host:port/db", "--storage: not a database URL. Give a file"),
            ("sqlite://tuner.db", "sqlite://tuner.db lacks a slash. Write sqlite:///relative"),
            ("postgresql://me:secret@127.0.0.1:1/db?password=secret", "Check host, port, user"),
        ],
    )
    def test_urls(self, storage: str, message: str) -> None:
        """A URL that names no database says what one looks like, and shows no password."""
        with pytest.raises(UsageError, match=message) as caught:
            Store.open(storage)
        assert "secret" not in str(caught.value)

    def test_not_a_database(self, tmp_path: Path) -> None:
        """A file of another kind is named, and left as it is."""
        path = tmp_path / "notes.txt"
        path.write_text("not a database\n" * 100)
        with pytest.raises(UsageError, match=r"notes.txt is not a SQLite database. Choose another"):
            Store.open(str(path))
        assert path.read_text() == "not a database\n" * 100

    def test_folder_that_is_a_file(self, tmp_path: Path) -> None:
        """A parent that is no folder is a reason, not a traceback."""
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"cannot be used: .*Choose a --storage in a folder"):
            Store.open(str(tmp_path / "file" / "tuner.db"))

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
    def test_folder_that_nobody_can_write_to(self) -> None:
        """A folder that not even root can write to is a reason, not a traceback."""
        with pytest.raises(UsageError, match=r"cannot be used: .*Choose a --storage in a folder"):
            Store.open("/proc/tuner.db")

    def test_read_only_file(self, tmp_path: Path) -> None:
        """A database that cannot be written to is refused when it is opened, not after a trial."""
        Store.open(str(tmp_path / "tuner.db")).close()
        with pytest.raises(UsageError, match="attempt to write a readonly database"):
            Store.open(f"sqlite:///file:{tmp_path / 'tuner.db'}?mode=ro&uri=true")

    def test_locked(self, tmp_path: Path) -> None:
        """A database that another program keeps locked says so, after the time-out."""
        path = tmp_path / "tuner.db"
        Store.open(str(path)).close()
        other = sqlite3.connect(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match=r"is locked. Another program is writing to it"):
            Store.open(f"sqlite:///{path}?timeout=0.05")
        other.close()

    def test_without_psycopg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PostgreSQL without its driver says which extra to install."""
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(UsageError, match=r"needs psycopg 3.*pip install 'p99-tuner\[postgres"):
            Store.open("postgresql://127.0.0.1/db")

    @pytest.mark.parametrize(
        ("version", "message"),
        [
            (SCHEMA_VERSION + 1, "by a tuner that is newer .* Upgrade the tuner, or choose"),
            (SCHEMA_VERSION - 1, "by a tuner that is older .* Move it away, or choose"),
        ],
    )
    def test_other_versions(self, storage_url: str, version: int, message: str) -> None:
        """A database of another version is refused before anything is written to it."""
        Store.open(storage_url).close()
        engine = create_engine(storage_url)
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE tuner_schema SET version = {version}"))
        engine.dispose()
        with pytest.raises(UsageError, match=message):
            Store.open(storage_url)

    def test_no_such_postgres_database(self, storage_url: str) -> None:
        """A server without the database says which one is missing."""
        if storage_url.startswith("sqlite"):
            pytest.skip("SQLite makes its files")
        with pytest.raises(UsageError, match='database "nowhere" does not exist'):
            Store.open(storage_url.rpartition("/")[0] + "/nowhere")


def test_opening_is_one_transaction(storage_url: str) -> None:
    """Many may open a new database at once: all find it complete."""
    opened = []

    def open_it() -> None:
        with Store.open(storage_url) as store:
            opened.append(store.studies())

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [[]] * 8


def test_folder_is_made(tmp_path: Path) -> None:
    """A database in a folder that does not exist yet makes it."""
    with Store.open(str(tmp_path / "new" / "tuner.db")) as store:
        assert store.studies() == []


def test_odd_file_names(tmp_path: Path) -> None:
    """A plain path may hold what means something in a URL; Optuna finds the same file."""
    path = tmp_path / "a?b%20{c}#d.db"
    with Store.open(str(path)) as store:
        optuna.create_study(study_name="s", storage=store.optuna_storage())
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT study_name FROM studies").fetchall() == [("s",)]
    connection.close()


def test_sqlite_settings(tmp_path: Path) -> None:
    """A file is in WAL mode, so that `tuner show` reads while a run writes."""
    Store.open(str(tmp_path / "tuner.db")).close()
    connection = sqlite3.connect(tmp_path / "tuner.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
