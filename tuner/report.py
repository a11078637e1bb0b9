"""The result of a run: one document for machines, and a page of text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner.confirm import Confirmation
from tuner.measurement import Measurement, Status, TrialResult
from tuner.objective import Objective, best_of
from tuner.watch import searched, trial_line

SCHEMA_VERSION = 1


def measurement_document(m: Measurement) -> dict[str, Any]:
    """One measurement's figures, JSON-ready: no NaN and no infinity."""
    verdict = m.verdict
    return {
        "phase": m.phase,
        "rate_rps": m.rate_rps,
        "seed": m.seed,
        "arrivals": m.arrivals,
        "duration_s": round(m.duration_s, 3),
        "verdict": str(verdict.outcome),
        "confidence": verdict.confidence,
        "requests": verdict.requests,
        "violations": verdict.violations,
        "p50_ms": finite(verdict.p50_ms),
        "p95_ms": finite(verdict.p95_ms),
        "p99_ms": finite(verdict.p99_ms),
        "p99_interval_ms": [finite(verdict.p99_low_ms), finite(verdict.p99_high_ms)],
        "goodput_rps": round(m.goodput_rps, 2),
        "errors": m.errors,
        "mean_batch": finite(m.work.mean_batch),
        "queue_ms": finite(m.work.per_request_ms(m.work.queue_s)),
        "preprocess_ms": finite(m.work.per_request_ms(m.work.preprocess_s)),
        "device_busy": m.device.busy_share,
        "device_busy_source": m.device.source,
        "device_notes": list(m.device.notes),
        "device_s_per_request": finite(m.device_s_per_request, 7),
        "offered_rps": finite(m.certificate.offered_rps),
        "send_lag_p99_ms": finite(m.certificate.send_lag_p99_ms),
        "generator_cpu_share": finite(m.certificate.generator_cpu_share),
        "fault": m.certificate.fault,
    }


def trial_document(number: int, result: TrialResult) -> dict[str, Any]:
    """One trial, JSON-ready."""
    predicted = result.prediction
    return {
        "number": number,
        "origin": result.origin,
        "status": str(result.status),
        "reason": result.reason,
        "feasible": result.feasible,
        "configuration": dict(result.configuration),
        "values": {k: finite(v, 7) for k, v in result.values.items()},
        "constraints": {k: finite(v) for k, v in result.constraints.items()},
        "capacity_rps": finite(result.capacity_rps),
        "capacity_bound_rps": finite(result.capacity_bound_rps),
        "predicted": None
        if predicted is None
        else {k: finite(v, 6) for k, v in vars(predicted).items()},
        "measurements": [measurement_document(m) for m in result.measurements],
        "timings_s": {k: round(v, 3) for k, v in result.timings_s.items()},
    }


def confirmation_document(c: Confirmation, ceiling_rps: float) -> dict[str, Any]:
    """One finalist, JSON-ready."""
    return {
        "trial": c.trial_number,
        "configuration": dict(c.configuration),
        "capacity_rps": finite(c.capacity_rps),
        "ceiling_rps": finite(ceiling_rps),
        "values": {k: finite(v, 7) for k, v in c.values.items()},
        "load": measurement_document(c.load),
        "at_capacity": None if c.at_capacity is None else measurement_document(c.at_capacity),
    }


def finite(value: float, digits: int = 4) -> float | None:
    """A rounded number, or None for what JSON cannot hold."""
    return round(value, digits) if math.isfinite(value) else None


def run_document(
    *,
    study: str,
    objective: Objective,
    budget_ms: float,
    target_rps: float,
    asked_qps: float | None,
    ceiling_rps: float,
    defaults: Mapping[str, Any],
    results: Sequence[tuple[int, TrialResult]],
    finalists: Sequence[Confirmation],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole outcome of one run. `winner` is None when nothing met the budget."""
    winner = next((c for c in finalists if c.holds), None)
    default = next((c for c in finalists if dict(c.configuration) == dict(defaults)), None)
    choices = {str(o): best_of(list(results), o) for o in Objective}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "tuner/run",
        "study": study,
        "objective": str(objective),
        "budget_ms": budget_ms,
        "target_rps": target_rps,
        "asked_qps": asked_qps,
        "ceiling_rps": finite(ceiling_rps),
        "winner": winner and confirmation_document(winner, ceiling_rps),
        "defaults": default and confirmation_document(default, ceiling_rps),
        "would_choose": choices,
        "trials": [trial_document(n, r) for n, r in results],
        "provenance": dict(provenance),
    }


def render(document: Mapping[str, Any], results: Sequence[tuple[int, TrialResult]]) -> Group:
    """The page a person reads at the end."""
    parts: list[RenderableType] = [trials_table(results, document), Text()]
    parts.append(Text(sentence(document), style="bold"))
    parts += [Text(line) for line in prior_lines(results)]
    if document["winner"]:
        parts += [Text(), comparison_table(document), Text(), Text(next_command(document))]
    parts += [Text(line) for line in choice_lines(document)]
    return Group(*parts)


def sentence(document: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    budget, winner = f"{document['budget_ms']:g} ms", document["winner"]
    if winner is None:
        return f"No configuration met P99 <= {budget}. {_closest(document)}"
    # The defaults may win although they miss on the load of a finalist that did not hold it.
    missed = winner["load"]["verdict"] == "misses"
    load = winner["at_capacity"] if missed and winner["at_capacity"] else winner["load"]
    low, high = load["p99_interval_ms"]
    text = (
        f"Trial {winner['trial']} holds P99 <= {budget} at {load['rate_rps']:.0f}/s: P99 "
        f"{_ms(load['p99_ms'])} ({_ms(low)} to {_ms(high)}), {load['violations']} of "
        f"{load['requests']} requests over it, verdict {load['verdict']} at "
        f"{load['confidence']:.0%} with fresh seeds."
    )
    if winner["capacity_rps"]:
        share = winner["values"]["utilization"]
        text += (
            f" Its capacity is {winner['capacity_rps']:.0f}/s, useful utilization {share:.1%} of "
            f"the device's {document['ceiling_rps']:.0f}/s."
        )
    return text + _against_defaults(document)


def _against_defaults(document: Mapping[str, Any]) -> str:
    winner, default, objective = document["winner"], document["defaults"], document["objective"]
    if default is None or default["trial"] == winner["trial"]:
        return "" if default is None else " These are the server's own defaults."
    ours, theirs = winner["values"][objective], default["values"][objective]
    if ours is None or not theirs or (objective == "utilization" and not default["capacity_rps"]):
        return f" The server's defaults: {default['load']['verdict']} on the same load."
    return f" That is {ours / theirs - 1:+.0%} {objective} against the server's defaults."


def _closest(document: Mapping[str, Any]) -> str:
    tried = [t for t in document["trials"] if t["measurements"]]
    tried = [t for t in tried if t["measurements"][0]["p99_ms"] is not None]
    if not tried:
        return "Not one measurement came back with a P99. Lower --qps or widen the space."
    best = min(tried, key=lambda t: float(t["measurements"][0]["p99_ms"]))
    m = best["measurements"][0]
    return (
        f"Closest: trial {best['number']}, P99 {_ms(m['p99_ms'])} at {m['rate_rps']:.0f}/s. "
        f"Try a larger --p99-budget, a lower --qps, or a wider --space."
    )


def trials_table(results: Sequence[tuple[int, TrialResult]], document: Mapping[str, Any]) -> Table:
    """Every measured trial, best first; then what was not measured, with the reason."""
    objective = Objective(document["objective"])
    table = Table(title=f"Trials of {document['study']}", title_justify="left", box=None)
    for heading in ("trial", "origin", "configuration", "verdict", "P99 ms", "capacity/s",
                    "useful util.", "busy", "dev. ms/req", "batch", "predicted"):  # fmt: skip
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    ran = [(n, r) for n, r in results if r.status is Status.MEASURED]
    for number, result in sorted(ran, key=lambda p: (not p[1].feasible, objective.rank(p[1]))):
        table.add_row(*_cells(number, result))
    return table


_LEFT = ("origin", "configuration", "verdict")


def _cells(number: int, result: TrialResult) -> list[str]:
    target = result.phase("target")
    assert target is not None
    predicted = result.prediction
    return [
        str(number), result.origin, searched(result), str(target.verdict.outcome),
        f"{target.verdict.p99_ms:.1f}", f"{result.capacity_rps:.0f}",
        f"{result.values.get('utilization', math.nan):.1%}", _share(target.device.busy_share),
        f"{1000 * target.device_s_per_request:.2f}", f"{target.work.mean_batch:.2f}",
        f"{predicted.mean_batch:.2f}" if predicted else "",
    ]  # fmt: skip


def prior_lines(results: Sequence[tuple[int, TrialResult]]) -> list[str]:
    """What was not measured, each with its reason (the first few of many)."""
    left_out = [trial_line(n, r).strip() for n, r in results if r.status is not Status.MEASURED]
    shown = left_out[:5]
    if len(left_out) > len(shown):
        shown.append(f"... and {len(left_out) - len(shown)} more: tuner show")
    return shown


def comparison_table(document: Mapping[str, Any]) -> Table:
    """Winner beside the server's defaults, measured on the same load with fresh seeds."""
    winner, default = document["winner"], document["defaults"]
    rate = winner["load"]["rate_rps"]
    table = Table(title=f"On the same load of {rate:.0f}/s, fresh seeds", title_justify="left",
                  box=None)  # fmt: skip
    table.add_column("")
    for name in ("winner", "server's defaults"):
        table.add_column(name, justify="right")
    for label, cell in _COMPARED:
        table.add_row(label, cell(winner), "" if default is None else cell(default))
    return table


def _interval(c: Mapping[str, Any]) -> str:
    low, high = c["load"]["p99_interval_ms"]
    return f"{_ms(c['load']['p99_ms'])} ({_ms(low)} to {_ms(high)})"


def _capacity(c: Mapping[str, Any]) -> str:
    return "none found" if c["at_capacity"] is None else f"{c['capacity_rps']:.0f}/s"


_COMPARED = (
    ("verdict", lambda c: f"{c['load']['verdict']} at {c['load']['confidence']:.0%}"),
    ("goodput", lambda c: f"{c['load']['goodput_rps']:.0f}/s"),
    ("P99 (interval)", _interval),
    ("device busy", lambda c: _share(c["load"]["device_busy"])),
    ("device ms per request", lambda c: _number(c["load"]["device_s_per_request"], 1000, 2)),
    ("mean batch", lambda c: _number(c["load"]["mean_batch"], 1, 2)),
    ("capacity inside the budget", _capacity),
    ("useful utilization", lambda c: _share(c["values"]["utilization"])),
)


def choice_lines(document: Mapping[str, Any]) -> list[str]:
    """Which trial each objective would have chosen; the literal one rewards waste."""
    chosen = ", ".join(
        f"{objective}: {'none' if number is None else f'trial {number}'}"
        for objective, number in document["would_choose"].items()
    )
    return [f"Each objective's choice among these trials: {chosen}."]


def next_command(document: Mapping[str, Any]) -> str:
    return f"Next: tuner export {document['study']} -o best.yaml && tuner serve best.yaml"


def print_report(
    document: Mapping[str, Any], results: Sequence[tuple[int, TrialResult]], console: Console
) -> None:
    """Print the page; wide tables are not cut off a terminal."""
    console.print(render(document, results))


def _ms(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.1f} ms"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "unknown" if value is None else f"{factor * value:.{digits}f}"
