"""Proposals and samplers: guesses first, nothing twice, nothing lost between runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import optuna
import pytest

from tests.tuner.examples import DEFAULTS, configuration, prior, result
from tuner.guesses import guesses
from tuner.measurement import Status, TrialResult
from tuner.objective import Objective
from tuner.search import MODES, Proposal, Search, grid_proposals, open_study
from tuner.settings import RunSettings
from tuner.space import Choice, FloatRange, IntRange, Space

SPACE = Space(
    "test",
    {
        "batch_window_ms": FloatRange(0.0, 20.0, 5.0),
        "max_batch_size": Choice((1, 8, 32)),
        "workers": IntRange(1, 2),
    },
)
# Outside of the space: a maximum of 4.
OUTSIDE = configuration(max_batch_size=4, batch_window_ms=0.0)


def search(
    storage: optuna.storages.BaseStorage,
    proposals: Iterable[Proposal] = (),
    mode: str = "tpe",
    *,
    sampler: bool = True,
) -> Search:
    study = open_study(storage, "study", Objective.UTILIZATION, mode, seed=1)
    return Search(study, SPACE, proposals, DEFAULTS, sampler=sampler)


def ask_and_tell(searching: Search, answer: TrialResult | None = None) -> tuple[int, str]:
    """One round; the trial's number and origin."""
    asked = searching.ask()
    assert asked is not None
    trial, wanted, origin = asked
    told = answer or replace(result(utilization=0.3), configuration=wanted)
    searching.tell(trial, told, Objective.UTILIZATION)
    return trial.number, origin


@pytest.fixture
def storage() -> optuna.storages.BaseStorage:
    return optuna.storages.InMemoryStorage()


def test_proposals_come_first_and_in_order(storage: optuna.storages.BaseStorage) -> None:
    """Defaults outside the space run as they are; then the guess; then the sampler."""
    first = Proposal("defaults", SPACE.nearest(OUTSIDE), actual=OUTSIDE)
    guess = Proposal("prior", {"batch_window_ms": 5.0, "max_batch_size": 32, "workers": 2})
    searching = search(storage, [first, guess])
    asked = searching.ask()
    assert asked is not None
    assert asked[1] == OUTSIDE
    searching.tell(asked[0], result(), Objective.UTILIZATION)
    assert [ask_and_tell(searching)[1] for _ in range(2)] == ["prior", "sampler"]


def test_a_new_run_passes_over_what_was_tried(storage: optuna.storages.BaseStorage) -> None:
    """The same proposals again go on where the first run stopped."""
    proposals = list(grid_proposals(SPACE))[:3]
    ask_and_tell(search(storage, proposals, "grid", sampler=False))
    again = search(storage, proposals, "grid", sampler=False)
    assert [ask_and_tell(again)[1] for _ in range(2)] == ["grid", "grid"]
    assert again.ask() is None


def test_an_interrupted_trial_is_tried_again(storage: optuna.storages.BaseStorage) -> None:
    """A trial left running by a tuner that died keeps its point and its origin."""
    guess = Proposal("prior", {"batch_window_ms": 5.0, "max_batch_size": 32, "workers": 2})
    asked = search(storage, [guess]).ask()
    assert asked is not None
    again = search(storage).ask()
    assert again is not None
    assert again[1] == asked[1]
    assert again[2] == "prior"


def test_states_are_told_as_meant(storage: optuna.storages.BaseStorage) -> None:
    """Crashes are COMPLETE with positive constraints, skips PRUNED, our own faults FAIL."""
    searching = search(storage)
    crashed = TrialResult(
        configuration(), "x", Status.CRASHED, constraints={"p99": 4.6, "startup": 1.0}
    )
    for answer in (
        crashed,
        TrialResult(configuration(), "x", Status.SKIPPED, constraints={"p99": 1.0}),
        TrialResult(configuration(), "x", Status.VOID),
    ):
        ask_and_tell(searching, answer)
    trials = open_study(storage, "study", Objective.UTILIZATION, "tpe", 1).get_trials()
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "FAIL"]
    assert trials[0].constraints == {"p99": 4.6, "startup": 1.0}
    assert trials[0].user_attrs["feasible"] is False
    assert json.loads(trials[0].user_attrs["configuration"])["engine"] == "eager"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_proposes_points_of_the_space(
    storage: optuna.storages.BaseStorage, mode: str
) -> None:
    """Feasible and infeasible trials told, the next proposal is still inside."""
    proposals = grid_proposals(SPACE) if mode == "grid" else iter(())
    searching = search(storage, proposals, mode, sampler=mode != "grid")
    for i in range(9):
        ask_and_tell(searching, result(utilization=i / 10, feasible=i % 3 > 0))
    trials = open_study(storage, "study", Objective.UTILIZATION, mode, 1).get_trials()
    assert len(trials) == 9
    assert all(SPACE.contains(t.params) for t in trials)


def test_guesses_differ_in_what_needs_a_restart() -> None:
    """The best few, none forbidden, each from another server start."""
    settings = RunSettings(
        min_agreement=0.99,
        p99_budget_s=0.1, qps=None, server={}, payloads=None, space="test",
        objective=Objective.UTILIZATION, trials=None, time_budget_s=60, storage="", seed=0,
        search="prior", study_name=None,
    )  # fmt: skip
    found = guesses(SPACE, prior(), settings)
    assert [p.origin for p in found] == ["prior", "prior"]  # one or two workers
    assert {p.point["workers"] for p in found} == {1, 2}
    assert all(prior().forbids(p.point, None) is None for p in found)
