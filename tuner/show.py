"""What is in the store: studies, their trials, one trial, and the one to export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rich.console import Group, RenderableType
from rich.pretty import Pretty
from rich.table import Table
from rich.text import Text

from tuner.errors import NothingMeetsError, UsageError
from tuner.export import export_document
from tuner.measurement import TrialResult
from tuner.objective import Objective, best_of
from tuner.report import measurement_document, render, trial_document, trials_table
from tuner.rows import StudyRecord
from tuner.store import Store
from tuner.watch import trial_line


@dataclass(frozen=True)
class Shown:
    """The same content for machines and for people."""

    document: dict[str, Any]
    page: RenderableType


def show(store: Store, name: str | None, trial: int | None) -> Shown:
    """A study's last report, or one trial of it.

    Raises:
        UsageError: no such study or trial.
    """
    record = find_study(store, name)
    results = store.trials(record.name)
    if trial is not None:
        return _one_trial(trial, _pick(record, results, trial))
    runs = store.results(record.name)
    if runs:
        return Shown(runs[-1], render(runs[-1], results))
    document = {
        "schema_version": 1, "kind": "tuner/study", "study": record.name,
        "objective": record.settings["objective"],
        "trials": [trial_document(n, r) for n, r in results],
    }  # fmt: skip
    note = Text("No run of this study has finished; run the same command again to go on.")
    return Shown(document, Group(trials_table(results, document), note))


def chosen(store: Store, name: str | None, trial: int | None, *, force: bool) -> dict[str, Any]:
    """The export document of the winner of the last run, or of one trial.

    Raises:
        UsageError: no such study or trial, or it does not meet the budget and `force` is not set.
        NothingMeetsError: the study has no configuration that meets the budget.
    """
    record = find_study(store, name)
    results = store.trials(record.name)
    finalists = _finalists(store, record.name)
    number = trial
    if number is None:
        number = finalists["winner"]["trial"] if "winner" in finalists else None
    if number is None and not finalists:  # no run has finished: the best trial so far
        number = best_of(results, Objective(record.settings["objective"]))
    if number is None:
        raise NothingMeetsError(
            f"Study {record.name!r} has no configuration that meets the budget.",
            hint="Export one all the same with --trial N --force.",
        )
    result = _pick(record, results, number)
    if not result.feasible and not force:
        raise UsageError(
            f"Trial {number} does not meet the budget ({result.reason}).",
            hint="Export it all the same with --force; the file will say so.",
        )
    confirmed = next((f for f in finalists.values() if f["trial"] == number), None)
    return export_document(record, number, result, confirmed)


def find_study(store: Store, name: str | None) -> StudyRecord:
    """The named study, or the latest."""
    studies = store.studies()
    if not studies:
        raise UsageError("The storage holds no study.", hint="Run tuner run first.")
    if name is None:
        return studies[-1]
    found = next((s for s in studies if s.name == name), None)
    if found is None:
        names = [s.name for s in studies]
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}."
        raise UsageError(f"{name!r} is not a study of this storage.", hint=hint)
    return found


def _finalists(store: Store, name: str) -> dict[str, Mapping[str, Any]]:
    """Winner and defaults of the last finished run, as far as it had them."""
    runs = store.results(name)
    if not runs:
        return {}
    return {role: runs[-1][role] for role in ("winner", "defaults") if runs[-1][role]}


def _pick(record: StudyRecord, results: list[tuple[int, TrialResult]], number: int) -> TrialResult:
    found = dict(results).get(number)
    if found is None:
        numbers = [n for n, _ in results]
        span = f"0 to {max(numbers)}" if numbers else "none yet"
        raise UsageError(
            f"--trial: {number} is not a trial of {record.name}.", hint=f"It has {span}."
        )
    return found


def _one_trial(number: int, result: TrialResult) -> Shown:
    document = trial_document(number, result)
    parts: list[RenderableType] = [Text(trial_line(number, result).strip(), style="bold")]
    if result.measurements:
        parts.append(_measurements_table(result))
    rest = {k: document[k] for k in ("configuration", "predicted", "values", "constraints",
                                     "timings_s", "reason")}  # fmt: skip
    parts.append(Pretty(rest, expand_all=True))
    if result.log_tail:
        parts += [Text("Last lines of the server's log:"), Text(result.log_tail)]
    return Shown({**document, "log_tail": result.log_tail}, Group(*parts))


def _measurements_table(result: TrialResult) -> Table:
    table = Table(box=None)
    columns = ("phase", "rate_rps", "verdict", "p50_ms", "p99_ms", "p99_interval_ms", "requests",
               "violations", "goodput_rps", "mean_batch", "device_busy", "offered_rps",
               "send_lag_p99_ms", "errors")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in ("phase", "verdict") else "right")
    for m in result.measurements:
        document = measurement_document(m)
        table.add_row(*(_cell(document[name]) for name in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return " to ".join(_cell(v) for v in value)
    return "" if value is None else str(value)
