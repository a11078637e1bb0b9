"""`tuner devices`: what the server says that it can do here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tuner.errors import UsageError
from tuner.server import ServerError, describe


def abilities(server: Mapping[str, Any]) -> dict[str, Any]:
    """Devices, engines by precision, preprocessing; None, or why not.

    Raises:
        UsageError: there is no such device or model.
    """
    with tempfile.TemporaryDirectory(prefix="tuner-") as scratch:
        try:
            described = describe(server, Path(scratch))
        except ServerError as failure:
            raise UsageError(failure.reason) from failure
    keys = ("devices", "engines", "combinations", "precisions", "preprocessing", "versions")
    return {"device": described["defaults"]["device"], **{k: described[k] for k in keys}}


def page(described: Mapping[str, Any]) -> Group:
    """The same for people."""
    names = ", ".join(f"{d['id']} ({d['name']}, {d['memory_bytes'] / 2**30:.0f} GiB)"
                      for d in described["devices"])  # fmt: skip
    precisions = list(described["precisions"])
    table = Table("engine", *precisions, "why not", title=f"Engines on {described['device']}")
    for engine, by_precision in described["combinations"].items():
        marks = ["yes" if by_precision[p] is None else "-" for p in precisions]
        reasons = [f"{p}: {by_precision[p]}" for p in precisions if by_precision[p]]
        table.add_row(engine, *marks, described["engines"][engine] or "; ".join(reasons))
    kinds = [
        f"{kind}: {'yes' if reason is None else reason}"
        for kind, reason in described["preprocessing"].items()
    ]
    versions = [f"{name} {version}" for name, version in described["versions"].items() if version]
    return Group(
        Text(f"Devices: {names}"),
        table,
        Text("Preprocessing: " + ", ".join(kinds)),
        Text("Versions: " + ", ".join(versions)),
    )
