"""`tuner run` from settings to the finished report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner import __version__
from tuner.confirm import Confirmation
from tuner.errors import MeasurementError, NothingMeetsError
from tuner.measurement import Status, TrialResult
from tuner.report import run_document, sentence
from tuner.settings import RunSettings
from tuner.setup import open_bench
from tuner.study import Bench, Deadline, confirm_finalists, search_configurations
from tuner.watch import open_watch


@dataclass(frozen=True)
class Outcome:
    """What a run hands back: the document, and the trials behind it for the page of text."""

    document: dict[str, Any]
    results: list[tuple[int, TrialResult]]

    @property
    def exit_code(self) -> int:
        """0 with a winner, 5 where nothing could be trusted, 4 where nothing met the budget."""
        if self.document["winner"] is not None:
            return 0
        ran = [r for _, r in self.results if r.status is not Status.SKIPPED]
        if ran and all(r.status is Status.VOID for r in ran):
            return MeasurementError.exit_code
        return NothingMeetsError.exit_code


def run(settings: RunSettings) -> Outcome:
    """Search, confirm, report. Everything finished is in the store, however this ends.

    Raises:
        TunerError: an input, the server or the measurement failed; see the subclasses.
        KeyboardInterrupt: interrupted; the message how to go on has been printed.
    """
    began = time.monotonic()
    deadline = Deadline(began + settings.time_budget_s, settings.time_budget_s)
    with open_watch(deadline.ends_s) as watch, open_bench(settings, deadline, watch) as bench:
        try:
            watch.note(_opening(bench))
            results = search_configurations(bench, settings.trials)
            finalists = confirm_finalists(bench, results)
        except KeyboardInterrupt:
            watch.note(
                f"Interrupted. Finished trials are kept: run the same command again to go on, or "
                f"tuner show {bench.name} --storage {settings.storage}"
            )
            raise
        document = _document(settings, bench, results, finalists, time.monotonic() - began)
        bench.store.save_result(bench.name, document)
        return Outcome(document, results)


def _opening(bench: Bench) -> str:
    asked = "asked for" if bench.plan.must_hold_target else "70 % of the predicted best capacity"
    return (
        f"Study {bench.name}: target {bench.plan.target_rps:.0f}/s ({asked}), ceiling of the "
        f"device {bench.plan.ceiling_rps:.0f}/s, objective {bench.plan.objective}"
    )


def _document(
    settings: RunSettings,
    bench: Bench,
    results: list[tuple[int, TrialResult]],
    finalists: list[Confirmation],
    took_s: float,
) -> dict[str, Any]:
    record = bench.store.study(bench.name)
    assert record is not None
    provenance: Mapping[str, Any] = {
        "tuner": __version__,
        "fingerprint": record.fingerprint,
        "search": settings.search,
        "server_starts": bench.rig.server.starts,
        "took_s": round(took_s, 1),
    }
    document = run_document(
        study=bench.name,
        objective=bench.plan.objective,
        budget_ms=settings.p99_budget_ms,
        target_rps=bench.plan.target_rps,
        asked_qps=settings.qps,
        ceiling_rps=bench.plan.ceiling_rps,
        defaults=bench.defaults,
        results=results,
        finalists=finalists,
        provenance=provenance,
    )
    return {**document, "sentence": sentence(document)}
