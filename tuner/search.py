"""Proposing configurations: queued guesses first, then an Optuna sampler. Ask and tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from tuner.configuration import Configuration, Value
from tuner.errors import UsageError
from tuner.measurement import Status, TrialResult
from tuner.objective import Objective
from tuner.space import Choice, FloatRange, IntRange, Parameter, Space

MODES = ("prior", "tpe", "gp", "random", "grid")
# Random trials before the model-based samplers start; Optuna's default of 10 is a whole run here.
STARTUP_TRIALS = 5


@dataclass(frozen=True)
class Proposal:
    """A point of the space to try, and who wants it tried.

    `actual` is the configuration to run where it lies outside the space, as the server's defaults
    may; the sampler is then told the nearest point inside.
    """

    origin: str
    point: Mapping[str, Value]
    actual: Configuration | None = None


class Search:
    """Ask/tell over one Optuna study and one space.

    Args:
        study: created by `open_study`.
        space: what may vary.
        proposals: tried in this order before the sampler is asked; a point that the study has
            already tried is passed over.
        fixed: the server's settings that do not vary, part of every configuration.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        proposals: Iterable[Proposal],
        fixed: Mapping[str, Value],
        *,
        sampler: bool,
    ) -> None:
        self._study = study
        self._proposals = iter(proposals)
        self._fixed = fixed
        self._sampler = sampler
        self._distributions = {k: distribution(p) for k, p in space.parameters.items()}
        self._requeue_interrupted()

    def ask(self) -> tuple[optuna.Trial, Configuration, str] | None:
        """The next trial, its configuration and its origin; None when there is nothing left."""
        actual = self._enqueue_next()
        if not self._has_waiting() and not self._sampler:
            return None
        trial = self._study.ask(self._distributions)
        origin = str(trial.user_attrs.get("origin", "sampler"))
        configuration = actual or Configuration.of({**self._fixed, **trial.params})
        trial.set_user_attr("configuration", configuration.to_json())
        trial.set_user_attr("origin", origin)
        return trial, configuration, origin

    def tell(self, trial: optuna.Trial, result: TrialResult, objective: Objective) -> None:
        """Report a result. What was not measured is told as PRUNED, our own faults as FAIL."""
        for name, value in result.constraints.items():
            trial.set_constraint(name, value)
        for name, told in _attributes(result).items():
            trial.set_user_attr(name, told)
        if result.status is Status.VOID:
            self._study.tell(trial, state=TrialState.FAIL)
        elif result.status is Status.SKIPPED:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, objective.told(result))

    def interrupted(self, trial: optuna.Trial) -> None:
        """Give a trial up that was cut short; the next run tries its point again."""
        self._study.tell(trial, state=TrialState.FAIL)
        self._requeue(trial.params, str(trial.user_attrs.get("origin", "sampler")))

    def _enqueue_next(self) -> Configuration | None:
        """Queue the next proposal that is new; returns its actual configuration, if it has one."""
        if self._has_waiting():
            return None
        tried = self._tried()
        for proposal in self._proposals:
            point = dict(proposal.point)
            wanted = proposal.actual or Configuration.of({**self._fixed, **point})
            if wanted not in tried:
                self._study.enqueue_trial(point, user_attrs={"origin": proposal.origin})
                return wanted
        return None

    def _tried(self) -> set[Configuration]:
        """What finished trials ran, which is not always the point that the sampler was told."""
        trials = self._study.get_trials(deepcopy=False)
        told = [t.user_attrs.get("configuration") for t in trials if t.state.is_finished()
                and t.state is not TrialState.FAIL]  # fmt: skip
        return {Configuration.from_json(text) for text in told if text}

    def _has_waiting(self) -> bool:
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _requeue_interrupted(self) -> None:
        """Trials left RUNNING by a tuner that died repel the sampler; fail them and try again.

        Only called under the study's lock, so that no living tuner owns them.
        """
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)
            if set(trial.params) == set(self._distributions):
                self._requeue(trial.params, str(trial.user_attrs.get("origin", "sampler")))

    def _requeue(self, point: Mapping[str, Value], origin: str) -> None:
        self._study.enqueue_trial(dict(point), user_attrs={"origin": origin})


def open_study(
    storage: optuna.storages.BaseStorage, name: str, objective: Objective, mode: str, seed: int
) -> optuna.Study:
    """The named study, created or continued, with the sampler of this mode."""
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna.create_study(
        storage=storage,
        study_name=name,
        load_if_exists=True,
        direction=objective.direction,
        sampler=sampler_of(mode, seed),
    )


def sampler_of(mode: str, seed: int) -> optuna.samplers.BaseSampler:
    """The Optuna sampler behind a `--search` mode (`grid` needs none: it is all proposals)."""
    if mode == "gp":
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    if mode in ("random", "grid"):
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)


def grid_proposals(space: Space) -> Iterator[Proposal]:
    """Every point of a finite space.

    Raises:
        UsageError: the space has a continuous range.
    """
    if space.size() is None:
        raise UsageError(
            f"--search grid: the space {space.name!r} has a range without steps.",
            hint="Give each float range a step, or choose another --search.",
        )
    return (Proposal("grid", point) for point in space.grid())


def distribution(parameter: Parameter) -> BaseDistribution:
    """The Optuna distribution of a parameter."""
    match parameter:
        case IntRange(low=low, high=high, log=log):
            return IntDistribution(low, high, log=log)
        case FloatRange(low=low, high=high, step=step, log=log):
            return FloatDistribution(low, high, step=step, log=log)
        case Choice(values=values):
            return CategoricalDistribution(values)


def _attributes(result: TrialResult) -> dict[str, float | str | bool]:
    """What dashboards can sort and filter by: optuna-dashboard does not read Optuna 5's named
    constraints, so feasibility is told as an attribute too."""
    attributes: dict[str, float | str | bool] = {
        "feasible": result.feasible,
        "status": str(result.status),
        "reason": result.reason,
        "capacity_rps": result.capacity_rps,
    }
    if target := result.phase("target"):
        attributes["p99_ms"] = target.verdict.p99_ms
        attributes["served_rps"] = target.goodput_rps
    return attributes
