"""Does our P99 agree with a load generator that was not written here?

Starts the reference server, sends it the same rate from wrk2 (constant rate, latency corrected for
coordinated omission, `-L`) and from our own generator with constant arrivals, in turn, and prints
both P99s of every round with our interval. wrk2 is not packaged; build it from
https://github.com/giltene/wrk2 and give its path:

    python benchmarks/agreement.py --wrk2 ../wrk2/wrk --rate 30

wrk2 paces each connection by itself and starts all of them at once, so that 16 connections send
bursts of 16: that is another arrival process with another P99. One connection, at a rate whose
period is longer than a response, sends what our constant arrivals are. wrk2 sends one body, so one
image of the payload set is used for both. It reports its corrected percentiles after a calibration
of about ten seconds, which is why a round lasts longer.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tuner import payloads
from tuner.configuration import Configuration
from tuner.load import LocustLoad
from tuner.measurement import Measurement
from tuner.phase import Load, Rig
from tuner.probe import open_probe
from tuner.server import Server

SETTINGS = {"model": "mobilenet_v3_small", "device": "cpu", "workers": 2, "max_batch_size": 16}
BUDGET_MS = 100.0
CONFIDENCE = 0.95


def main() -> int:
    """Run the rounds and print a table and one machine-readable line."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        rows = _rounds(options, Path(folder))
    print(f"{'round':>5} {'ours P99 ms':>12} {'interval':>18} {'n':>6} {'wrk2 P99 ms':>12}")
    for i, row in enumerate(rows):
        low, high = row["interval_ms"]
        interval = f"{low:.1f} to {high:.1f}"
        print(
            f"{i:>5} {row['ours_ms']:>12.2f} {interval:>18} {row['n']:>6} {row['wrk2_ms']:>12.2f}"
        )
    ours, theirs = (median(r[k] for r in rows) for k in ("ours_ms", "wrk2_ms"))
    print(f"median ours {ours:.2f} ms, wrk2 {theirs:.2f} ms, ratio {ours / theirs:.3f}")
    print(json.dumps({"benchmark": "agreement", "rate_rps": options.rate, "rounds": rows,
                      "ratio": ours / theirs}))  # fmt: skip
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--wrk2", required=True, help="path of wrk2's binary")
    parser.add_argument("--rate", type=float, default=30.0, help="requests/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each measurement")
    return parser.parse_args()


def _rounds(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    image = payloads.generate(folder / "payloads").paths[0]
    server = Server(SETTINGS, folder)
    generator = LocustLoad(folder)
    try:
        server.obtain(Configuration.of({"batch_window_ms": 2.0}))
        load = Load((image,), "constant", BUDGET_MS, CONFIDENCE)
        rig = Rig(generator, server, open_probe("cpu", set), load)
        rig.warm_up(options.rate, seed=0)
        rows = []
        for seed in range(options.rounds):
            # A confidence that no phase reaches keeps the verdict from ending it early; the phase
            # then ends as futile, at half of its limit.
            ours = rig.measure("agreement", options.rate, seed=seed, limit_s=2 * options.seconds,
                               confidence=1 - 1e-12)  # fmt: skip
            theirs = _wrk2(options, f"{server.url}/predict", image, folder)
            rows.append(_row(ours, theirs))
        return rows
    finally:
        generator.close()
        server.stop()


def _row(ours: Measurement, theirs_ms: float) -> dict[str, Any]:
    from tuner.verdict import quantile_interval

    latencies = ours.latencies_ms.astype(float)
    interval = quantile_interval(latencies, ours.verdict.effective_requests, CONFIDENCE)
    return {"ours_ms": ours.verdict.p99_ms, "interval_ms": interval, "n": ours.verdict.requests,
            "wrk2_ms": theirs_ms}  # fmt: skip


def _wrk2(options: argparse.Namespace, url: str, image: Path, folder: Path) -> float:
    """wrk2's corrected P99 in ms."""
    script = folder / "post.lua"
    script.write_text(
        'wrk.method = "POST"\n'
        f'local f = io.open("{image}", "rb")\nwrk.body = f:read("*a")\nf:close()\n'
    )
    seconds = int(options.seconds) + 10
    command = [options.wrk2, "-t1", "-c1", f"-d{seconds}s", f"-R{options.rate:g}", "-L", "-s",
               str(script), url]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if (found := re.search(r"99\.000%\s+([\d.]+)(us|ms|s)", text)) is None:
        raise SystemExit(f"wrk2 printed no 99th percentile:\n{text}")
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


if __name__ == "__main__":
    sys.exit(main())
