"""A trial with real processes: the synthetic engine behind real HTTP, real Locust in front."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.tuner.examples import DEFAULTS, configuration
from tuner.calibration import Calibration, calibrate, service_key
from tuner.configuration import Configuration, Value
from tuner.headroom import Effort
from tuner.load import LocustLoad
from tuner.measurement import Status, TrialResult
from tuner.objective import Objective
from tuner.payloads import photo_like
from tuner.phase import Load, Rig
from tuner.prior import Prior
from tuner.probe import ExecutorProbe
from tuner.server import Server, ServerError, describe
from tuner.trial import TrialPlan, run_trial

pytestmark = pytest.mark.slow

# S(b) = 8 + 2 b ms: batches of one carry 100/s, batches of eight 333/s.
TIMING = {"base_ms": 8.0, "per_item_ms": 2.0}
SYNTHETIC: dict[str, Value] = {"engine": "synthetic", "batch_window_ms": 2.0}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small photo-like JPEG."""
    import numpy as np

    path = tmp_path_factory.mktemp("payload") / "small.jpg"
    photo_like(64, 64, np.random.default_rng(0)).save(path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server({"synthetic": TIMING}, tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def rig(server: Server, image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with LocustLoad(tmp_path_factory.mktemp("loadgen")) as generator:
        load = Load((image,), "poisson", budget_ms=150.0, confidence=0.95)
        yield Rig(generator, server, ExecutorProbe(), load)


@pytest.fixture(scope="module")
def prior(server: Server, image: Path) -> Prior:
    """Calibrated on the real processes."""
    full = configuration(**SYNTHETIC, preprocessing="pil")
    calibration = calibrate(server, [full], images=[image.read_bytes()], largest=16, budget_s=0.15)
    return Prior(calibration, 150.0, {**DEFAULTS, **full}, shared_cores=None)


PLAN = TrialPlan(
    objective=Objective.UTILIZATION,
    target_rps=60.0,
    must_hold_target=False,
    ceiling_rps=400.0,
    seed=1,
    effort=Effort(scout_s=2.0, certify_s=12.0, scouts=4, tries=6),
)


def trial(rig: Rig, prior: Prior, plan: TrialPlan = PLAN, **changed: Value) -> TrialResult:
    wanted = configuration(**{**SYNTHETIC, "preprocessing": "pil", **changed})
    return run_trial(wanted, "test", rig=rig, plan=plan, prior=prior, clock=time.monotonic)


def test_calibration_finds_the_given_service_times(prior: Prior) -> None:
    """The executors' own clock never sees less than S(b) = 8 + 2 b ms, and more for more."""
    key = service_key(configuration(**SYNTHETIC))
    (one,) = prior.calibration.service[key]
    assert one.sizes == (1, 2, 4, 8, 16)
    for size, seconds in zip(one.sizes, one.seconds, strict=True):
        assert seconds >= (8 + 2 * size) / 1000
    assert list(one.seconds) == sorted(one.seconds)
    assert Calibration.from_document(prior.calibration.to_document()) == prior.calibration


def test_measures_a_configuration(rig: Rig, prior: Prior) -> None:
    """Every phase, value, constraint and prediction of an ordinary configuration is there."""
    result = trial(rig, prior)
    assert result.status is Status.MEASURED
    assert result.feasible
    assert result.capacity_rps > 0
    target = result.phase("target")
    assert target is not None
    assert target.certificate.fault is None
    assert target.work.answered == target.certificate.sent
    assert target.work.mean_batch >= 1.0
    assert 0.2 < target.device_s_per_request * 60 < 1.0
    assert result.values["utilization"] == pytest.approx(result.capacity_rps / 400, rel=0.15)
    assert set(result.timings_s) >= {"start", "target", "headroom"}
    assert "ready" in result.log_tail


def test_live_changes_do_not_restart(rig: Rig, prior: Prior) -> None:
    """Window and maximum batch change on the running server; instances do not."""
    quick = replace(PLAN, objective=Objective.EFFICIENCY, target_rps=40.0)
    trial(rig, prior, quick, max_batch_size=4)
    starts = rig.server.starts
    result = trial(rig, prior, quick, max_batch_size=2, batch_window_ms=10.0)
    assert rig.server.starts == starts
    target = result.phase("target")
    assert target is not None
    assert max(target.work.batch_sizes) <= 2


def test_batching_raises_the_capacity(rig: Rig, prior: Prior) -> None:
    """Batches of one carry under 100/s; batches of sixteen more than that."""
    alone = trial(rig, prior, max_batch_size=1)
    together = trial(rig, prior, max_batch_size=16)
    assert alone.capacity_rps < 100
    assert together.capacity_rps > 1.2 * alone.capacity_rps


def test_a_rate_that_cannot_be_held_is_infeasible(rig: Rig, prior: Prior) -> None:
    """At twice its capacity a configuration misses, soon, with a positive constraint."""
    plan = replace(PLAN, target_rps=250.0, must_hold_target=True)
    result = trial(rig, prior, plan, max_batch_size=1)
    assert result.status is Status.MEASURED
    assert not result.feasible
    assert result.constraints["p99"] > 0
    target = result.phase("target")
    assert target is not None
    assert target.duration_s < plan.target_limit_s


def test_a_server_that_cannot_start_is_infeasible(rig: Rig, prior: Prior) -> None:
    """The crash is the configuration's result, with the server's own words; the next one runs."""
    result = trial(rig, prior, workers=-1)
    assert result.status is Status.CRASHED
    assert not result.feasible
    assert "workers" in result.log_tail
    assert trial(rig, prior, replace(PLAN, objective=Objective.EFFICIENCY)).feasible


def test_a_server_that_dies_is_infeasible(rig: Rig, prior: Prior) -> None:
    """Killed under load, it is told as crashed, and nothing of it is left."""
    rig.server.obtain(configuration(**SYNTHETIC, preprocessing="pil"))
    victims = [psutil.Process(pid) for pid in rig.server.pids()]

    def kill_when_loaded(detail: str) -> None:
        if detail.startswith("target"):
            for victim in victims:
                if victim.cmdline()[1:3] == ["-m", "serving"]:
                    victim.kill()

    result = run_trial(
        configuration(**SYNTHETIC, preprocessing="pil"), "test",
        rig=rig, plan=PLAN, prior=prior, clock=time.monotonic, say=kill_when_loaded,
    )  # fmt: skip
    assert result.status is Status.CRASHED
    assert not any(victim.is_running() for victim in victims)


def test_stop_leaves_no_process(image: Path, tmp_path: Path) -> None:
    """After stop the server, its executors and its guard are gone."""
    server = Server({"synthetic": TIMING}, tmp_path)
    server.obtain(Configuration.of({"engine": "synthetic", "instances": 2}))
    pids = server.pids()
    assert len(pids) == 4  # guard, front end, two executors
    assert server.predict(image.read_bytes())["synthetic"] is True
    server.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert server.pids() == set()


def test_describe_reports_the_servers_own_mistake(tmp_path: Path) -> None:
    """A misspelt model comes back as the server's one-line message."""
    with pytest.raises(ServerError, match="Did you mean mobilenet_v3_small"):
        describe({"model": "mobilenet_v3_smal"}, tmp_path)
