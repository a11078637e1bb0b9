"""Everything before the first trial: payloads, server, space, study, calibration, guesses."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from tuner import fingerprint, payloads
from tuner.calibration import Calibration, calibrate, variants_of
from tuner.configuration import Configuration
from tuner.errors import ServerStartError, UsageError
from tuner.guesses import guesses
from tuner.load import LocustLoad
from tuner.lock import exclusive
from tuner.payloads import PayloadSet
from tuner.phase import Load, Rig
from tuner.prior import Prior
from tuner.probe import open_probe
from tuner.rows import StudyRecord
from tuner.search import Proposal, Search, grid_proposals, open_study
from tuner.server import Server, ServerError, describe
from tuner.settings import RunSettings
from tuner.space import Space
from tuner.store import Store
from tuner.study import Bench, Deadline
from tuner.trial import TrialPlan
from tuner.watch import Watch

# Settings of the server that a configuration names; the rest (model, host, ...) is its base.
TUNABLE = ("batch_window_ms", "max_batch_size", "workers", "instances", "precision",
           "preprocessing", "engine", "queue_capacity")  # fmt: skip
# Without a rate from the user the target phase runs at this share of the predicted best capacity:
# enough for batches to form, and a rate that most configurations can be compared at.
TARGET_SHARE = 0.7
# One executor's memory beside its weights: torch with its libraries, and the activations.
EXECUTOR_BYTES = 1 << 30
SEARCH_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ground:
    """What is known before a study exists: the device, the payloads, the space that is left."""

    described: Mapping[str, Any]
    payloads: PayloadSet
    space: Space
    defaults: Configuration
    base: Mapping[str, Any]

    @property
    def device(self) -> str:
        return str(self.described["defaults"]["device"])


@contextmanager
def open_bench(settings: RunSettings, deadline: Deadline, watch: Watch) -> Iterator[Bench]:
    """Set everything up, and take everything down again however the run ends.

    Raises:
        UsageError: an input cannot be used as given.
        ServerStartError: the server cannot be started even for its calibration.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tuner-")))
        watch.stage("setting up")
        store = stack.enter_context(Store.open(settings.storage))
        ground = survey(settings, scratch, watch)
        stack.enter_context(exclusive(f"device {ground.device}"))
        server = Server({**ground.base, "guard": _guard(settings, ground)}, scratch)
        stack.callback(server.stop)
        generator = stack.enter_context(LocustLoad(scratch))
        probe = open_probe(ground.device, server.pids)
        stack.callback(probe.close)
        prior = _prior(settings, ground, store, server, watch)
        record = _study_record(settings, ground, store, prior)
        load = Load(ground.payloads.paths, "poisson", settings.p99_budget_ms, SEARCH_CONFIDENCE)
        plan = TrialPlan(
            objective=settings.objective,
            target_rps=record.target_rate_rps,
            must_hold_target=settings.qps is not None,
            ceiling_rps=record.ceiling_rps,
            seed=settings.seed,
        )
        yield Bench(
            name=record.name,
            store=store,
            search=_search(settings, ground, store, prior, plan, record.name),
            prior=prior,
            rig=Rig(generator, server, probe, load),
            plan=plan,
            defaults=ground.defaults,
            deadline=deadline,
            watch=watch,
        )


def _guard(settings: RunSettings, ground: Ground) -> dict[str, Any]:
    """Answers are compared on the payloads; kept out of what studies are compared by, because the
    folder's place says nothing."""
    samples = str(ground.payloads.paths[0].parent.resolve())
    return {"samples": samples, "min_agreement": settings.min_agreement}


def survey(settings: RunSettings, scratch: Path, watch: Watch) -> Ground:
    """Find the payloads, ask the server what it is, and cut the space to what the device can do."""
    images = _payloads(settings)
    watch.say("asking the server what this device can do")
    try:
        described = describe(settings.server, scratch)
    except ServerError as failure:
        raise UsageError(failure.reason) from failure
    cores = int(described["cores"])
    space = Space.load(settings.space, cores=cores)
    offered = {"precision": described["precisions"], "engine": described["engines"],
               "preprocessing": described["preprocessing"]}  # fmt: skip
    space, notes = space.restricted(offered)
    space, memory_notes = _fit_instances(space, described)
    for note in (*notes, *memory_notes):
        watch.note(f"Left out: {note}")
    settled = described["defaults"]
    defaults = {k: settled[k] for k in TUNABLE}
    defaults |= {k: settled[k] for k in ("threads",) if settings.server.get(k) is not None}
    base = {**settings.server, "model": settled["model"], "device": settled["device"]}
    base = {k: v for k, v in base.items() if k not in defaults}
    return Ground(described, images, space, Configuration.of(defaults), base)


def _payloads(settings: RunSettings) -> PayloadSet:
    if settings.payloads is not None:
        return payloads.load(settings.payloads)
    folder = Path(platformdirs.user_cache_dir("p99-tuner")) / "payloads"
    return payloads.generate(folder)


def _fit_instances(space: Space, described: Mapping[str, Any]) -> tuple[Space, tuple[str, ...]]:
    """Cut `instances` to what the device's memory holds."""
    instances = space.values("instances")
    device = next(d for d in described["devices"] if d["id"] == described["defaults"]["device"])
    each = EXECUTOR_BYTES + 4 * int(described["model"]["parameters"])
    most = max(int(device["memory_bytes"] // each), 1)
    if not any(isinstance(n, int) and n > most for n in instances):
        return space, ()
    note = f"instances above {most}: each needs about {each / 2**30:.1f} GiB of memory"
    return space.capped("instances", most), (note,)


def _prior(
    settings: RunSettings, ground: Ground, store: Store, server: Server, watch: Watch
) -> Prior:
    """The prior of this device and model, calibrated now or in an earlier run."""
    variants = variants_of(ground.space, ground.defaults)
    largest = int(
        max(ground.space.values("max_batch_size") or (ground.defaults["max_batch_size"],))
    )
    described = ground.described
    key = fingerprint.digest({
        "model": described["model"], "versions": described["versions"], "base": ground.base,
        "host": fingerprint.take(described)["cpu"], "payloads": ground.payloads.sha256,
        "variants": [dict(v) for v in variants], "largest": largest,
        "min_agreement": settings.min_agreement, "combinations": described["combinations"],
    })  # fmt: skip
    document = store.calibration(key)
    if document is None:
        watch.stage("calibrating")
        images = [path.read_bytes() for path in ground.payloads.paths]
        try:
            calibration = calibrate(
                server, variants, images=images, largest=largest,
                budget_s=settings.p99_budget_s, say=watch.say,
                obstacle=lambda variant: _obstacle(described, variant),
            )  # fmt: skip
        except ServerError as failure:
            raise ServerStartError(
                f"The server could not be started: {failure.reason}.",
                hint=f"Last lines of its log:\n{failure.log_tail}" if failure.log_tail else None,
            ) from failure
        store.save_calibration(key, calibration.to_document())
    else:
        calibration = Calibration.from_document(document)
    for refused, reason in calibration.refused.items():
        watch.note(f"Left out: {refused}: {reason}")
    shared = int(described["cores"]) if ground.device == "cpu" else None
    return Prior(calibration, settings.p99_budget_ms, ground.defaults, shared)


def _obstacle(described: Mapping[str, Any], variant: Configuration) -> str | None:
    """Why the server says that it cannot run a variant."""
    engine, precision = variant["engine"], variant["precision"]
    reason = described["combinations"].get(engine, {}).get(precision)
    device = described["defaults"]["device"]
    return None if reason is None else f"precision {precision} on {device}: {reason}"


def _study_record(settings: RunSettings, ground: Ground, store: Store, prior: Prior) -> StudyRecord:
    """The study to continue, or a new one; the same settings lead to the same study."""
    comparable = {
        "budget_ms": settings.p99_budget_ms, "qps": settings.qps, "seed": settings.seed,
        "min_agreement": settings.min_agreement,
        "objective": str(settings.objective), "space": ground.space.describe(),
        "model": ground.described["model"], "payloads": ground.payloads.sha256,
        "base": dict(ground.base), "defaults": dict(ground.defaults),
    }  # fmt: skip
    taken = fingerprint.take(ground.described)
    digest = fingerprint.digest({**comparable, "host": taken["cpu"]})[:6]
    name = settings.study_name or (
        f"{ground.described['model']['name']}-{ground.device.replace(':', '')}-"
        f"{settings.p99_budget_ms:g}ms-{settings.objective}-{digest}"
    )
    known = store.study(name)
    if known is None:
        best = max((prior.capacity_rps(p.point) for p in guesses(ground.space, prior, settings)),
                   default=prior.capacity_rps(ground.defaults))  # fmt: skip
        record = StudyRecord(
            name=name,
            settings=comparable,
            fingerprint=taken,
            target_rate_rps=settings.qps or max(round(TARGET_SHARE * best), 1),
            ceiling_rps=prior.calibration.ceiling_rps,
        )
        store.save_study(record)
        return record
    if json.dumps(known.settings, sort_keys=True) != json.dumps(comparable, sort_keys=True):
        changed = sorted(k for k in comparable if known.settings.get(k) != comparable[k])
        raise UsageError(
            f"--study-name: {name!r} exists and was made with other settings ({', '.join(changed)} "
            f"differ), so its trials cannot be compared with new ones.",
            hint="Choose another --study-name, or leave it out.",
        )
    return known


def _search(
    settings: RunSettings, ground: Ground, store: Store, prior: Prior, plan: TrialPlan, name: str
) -> Search:
    study = open_study(
        store.optuna_storage(), name, settings.objective, settings.search, settings.seed
    )
    first = Proposal("defaults", ground.space.nearest(ground.defaults), actual=ground.defaults)
    proposals = [first]
    if settings.search == "prior":
        rated = replace(settings, qps=plan.target_rps if plan.must_hold_target else None)
        proposals += guesses(ground.space, prior, rated)
    if settings.search == "grid":
        proposals += grid_proposals(ground.space)
    return Search(
        study, ground.space, proposals, ground.defaults, sampler=settings.search != "grid"
    )
