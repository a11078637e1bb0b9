"""The study loop: propose, measure, tell, store, until the time or the trials are used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from tuner.configuration import Configuration
from tuner.confirm import Confirmation, confirm
from tuner.errors import MeasurementError, ServerStartError
from tuner.measurement import Measurement, Status, TrialResult
from tuner.objective import Objective, best_of
from tuner.phase import Rig
from tuner.prior import Prior
from tuner.search import Search
from tuner.server import ServerError
from tuner.store import Store
from tuner.trial import FIRST_TRUST, TrialPlan, run_trial
from tuner.watch import Watch, searched

# A sampler that proposes only what is known or forbidden has converged.
BARREN_PROPOSALS = 60
# Kept back for the confirmation: two server starts, and a few phases of up to twelve seconds for
# the winner and for the defaults; in a short run at most this share of it.
CONFIRMATION_S = 55.0
CONFIRMATION_SHARE = 0.4
FINALISTS = 3
# This many starts in a row that fail, with none that worked, are not the configurations' fault.
HOPELESS_STARTS = 3


@dataclass(frozen=True)
class Deadline:
    """The wall clock of one run.

    Args:
        ends_s: on `clock`; no trial begins that is not expected to leave time to confirm.
    """

    ends_s: float
    budget_s: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.ends_s - self.clock()

    def allows_trial(self, durations_s: list[float]) -> bool:
        """Whether another trial fits, by the mean of those so far."""
        if not durations_s:
            return self.left_s > 0
        mean_s = sum(durations_s) / len(durations_s)
        kept_s = min(CONFIRMATION_S, CONFIRMATION_SHARE * self.budget_s)
        return self.left_s > kept_s + mean_s


@dataclass(frozen=True)
class Bench:
    """Everything a study works with, set up and ready."""

    name: str
    store: Store
    search: Search
    prior: Prior
    rig: Rig
    plan: TrialPlan
    defaults: Configuration
    deadline: Deadline
    watch: Watch


Numbered = tuple[int, TrialResult]


def search_configurations(bench: Bench, most_trials: int | None) -> list[Numbered]:
    """The loop: ask, measure, tell, store, stop?

    Returns:
        Every trial of the study, those of earlier runs included.

    Raises:
        ServerStartError: no configuration could be started.
        MeasurementError: no measurement could be trusted.
        KeyboardInterrupt: after the trial in progress was given back to the study.
    """
    store, objective, watch = bench.store, bench.plan.objective, bench.watch
    results, durations_s, barren = store.trials(bench.name), list[float](), 0
    while barren < BARREN_PROPOSALS and bench.deadline.allows_trial(durations_s):
        if most_trials is not None and measured(results) >= most_trials:
            watch.note(f"{most_trials} trials are done.")
            break
        if (asked := bench.search.ask()) is None:
            watch.note("Every proposed configuration has been tried.")
            break
        trial, configuration, origin = asked
        watch.stage(f"trial {trial.number}, {configuration}")
        began_s = bench.deadline.clock()
        try:
            result = _known(bench, configuration, origin, results) or run_trial(
                configuration,
                origin,
                rig=bench.rig,
                plan=bench.plan,
                prior=bench.prior,
                clock=bench.deadline.clock,
                trust=trust_in_prior(results),
                say=watch.say,
            )
        except BaseException:
            bench.search.interrupted(trial)
            raise
        # Ours first: what Optuna counts as finished must never be missing here.
        store.save_trial(bench.name, trial.number, result)
        bench.search.tell(trial, result, objective)
        results.append((trial.number, result))
        if result.status is Status.SKIPPED:
            barren += 1
        else:
            barren = 0
            durations_s.append(bench.deadline.clock() - began_s)
        watch.trial(trial.number, result, best_line(results, objective))
        _stop_if_hopeless(results)
    return results


def confirm_finalists(bench: Bench, results: list[Numbered]) -> list[Confirmation]:
    """Measure the best again with fresh seeds, and the server's defaults beside them.

    A finalist whose confirmed value falls below what the next one claims must face that one too.
    The first of the returned confirmations is the winner; the defaults are always among them if
    their trial could run.
    """
    objective, left = bench.plan.objective, dict(results)
    confirmed: list[Confirmation] = []
    while len(confirmed) < FINALISTS:
        number = best_of(list(left.items()), objective)
        if number is None or not _challenges(left[number], confirmed, objective):
            break
        if confirmed and bench.deadline.left_s < 0:
            break
        bench.watch.stage(f"confirming trial {number}")
        confirmed += _confirm_one(bench, number, left.pop(number))
    default = next((r for r in results if r[1].configuration == bench.defaults), None)
    if default and default[0] not in {c.trial_number for c in confirmed}:
        bench.watch.stage("measuring the server's defaults on the same load")
        best = min(confirmed, key=lambda c: objective.rank(_as_result(c)), default=None)
        confirmed += _confirm_one(
            bench, *default, beside=best.load if best and best.holds else None
        )
    return sorted(confirmed, key=lambda c: objective.rank(_as_result(c)))


def best_line(results: list[Numbered], objective: Objective) -> str:
    """The best so far, for people."""
    number = best_of(results, objective)
    if number is None:
        return "none meets the budget yet"
    best = dict(results)[number]
    return f"trial {number}: {objective} {best.values[objective]:.3g} ({searched(best)})"


def trust_in_prior(results: list[Numbered]) -> float:
    """The median of measured over predicted capacity, within reason: one disturbed trial must not
    send the next one far off."""
    ratios = [
        r.capacity_rps / r.prediction.capacity_rps
        for _, r in results
        if r.prediction and r.prediction.capacity_rps > 0 and r.capacity_rps > 0
    ]
    return min(max(median(ratios), 0.4), 1.2) if ratios else FIRST_TRUST


def measured(results: list[Numbered]) -> int:
    """Trials that count against `--trials`: what the prior skipped and void ones do not."""
    return sum(r.status in (Status.MEASURED, Status.CRASHED) for _, r in results)


def _known(
    bench: Bench, configuration: Configuration, origin: str, results: list[Numbered]
) -> TrialResult | None:
    """A result that needs no measurement: forbidden by the prior, or already measured."""
    skipped = TrialResult(configuration, origin, Status.SKIPPED)
    for number, earlier in results:
        if earlier.configuration == configuration and earlier.status is Status.MEASURED:
            constraints = earlier.constraints
            return replace(
                skipped, reason=f"already measured as trial {number}", constraints=constraints
            )
    rate = bench.plan.target_rps if bench.plan.must_hold_target else None
    if origin != "defaults" and (reason := bench.prior.forbids(configuration, rate)):
        if bench.prior.can_run(configuration):
            prediction = bench.prior.predict(configuration, bench.plan.target_rps)
            constraints = {"p99": 1.0, "startup": -1.0}
        else:
            prediction, constraints = None, {"p99": 1.0, "startup": 1.0}
        return replace(skipped, reason=reason, prediction=prediction, constraints=constraints)
    return None


def _stop_if_hopeless(results: list[Numbered]) -> None:
    tried = [r for _, r in results if r.status is not Status.SKIPPED]
    if len(tried) < HOPELESS_STARTS:
        return
    if all(r.status is Status.CRASHED for r in tried):
        last = tried[-1]
        raise ServerStartError(
            f"None of {len(tried)} configurations could be started: {last.reason}.",
            hint=f"Last lines of its log:\n{last.log_tail}",
        )
    if all(r.status is Status.VOID for r in tried):
        raise MeasurementError(
            f"No measurement could be trusted: {tried[-1].reason}.",
            hint="Lower --qps, end other work on this machine, or allow a higher priority.",
        )


def _challenges(result: TrialResult, confirmed: list[Confirmation], objective: Objective) -> bool:
    best = min(confirmed, key=lambda c: objective.rank(_as_result(c)), default=None)
    if best is None:
        return True
    return objective.better(result.values[objective], best.values[objective])


def _confirm_one(
    bench: Bench, number: int, result: TrialResult, beside: Measurement | None = None
) -> Iterator[Confirmation]:
    try:
        yield confirm(
            number,
            result.configuration,
            result.capacity_rps,
            rig=bench.rig,
            plan=bench.plan,
            beside=beside,
            say=bench.watch.say,
        )
    except ServerError as failure:
        bench.watch.note(f"Trial {number} did not survive its confirmation: {failure.reason}")


def _as_result(confirmation: Confirmation) -> TrialResult:
    """A confirmation in the form that objectives rank; what no longer meets ranks last."""
    return TrialResult(
        confirmation.configuration,
        "confirmed",
        Status.MEASURED,
        values=confirmation.values if confirmation.holds else {},
        measurements=(replace(confirmation.load, phase="target"),),
    )
