"""What the user asked for: the settings of `tuner run`, whatever they came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.objective import Objective


@dataclass(frozen=True)
class RunSettings:
    """One run of the tuner.

    Args:
        p99_budget_s: upper bound on the 99th percentile of response time.
        qps: rate that must be sustained, requests/s; None for no floor.
        server: settings of the reference server that do not vary, as in a server file.
        payloads: folder of images; None for generated ones.
        min_agreement: the accuracy guard: share of payloads on which a configuration must give the
            fp32 reference's class.
        trials: trials in the study altogether, earlier runs included; None for no limit.
        time_budget_s: wall clock of this run, set-up and confirmation included.
        study_name: None for a name made from what makes trials comparable.
    """

    p99_budget_s: float
    qps: float | None
    server: dict[str, Any]
    payloads: Path | None
    space: str
    objective: Objective
    min_agreement: float
    trials: int | None
    time_budget_s: float
    storage: str
    seed: int
    search: str
    study_name: str | None

    @property
    def p99_budget_ms(self) -> float:
        return self.p99_budget_s * 1000
