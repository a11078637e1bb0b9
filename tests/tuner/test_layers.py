"""What may import what: two packages that only speak HTTP, and a command line that starts fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "torchvision", "locust", "gevent", "optuna", "scipy", "sqlalchemy", "numpy")


def imported_by(package: str) -> set[tuple[str, str]]:
    """(file, imported top-level package) for every import of a package, late ones included."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found |= {(path.name, name.partition(".")[0]) for name in names}
    return found


@pytest.mark.parametrize(("package", "other"), [("tuner", "serving"), ("serving", "tuner")])
def test_packages_do_not_import_each_other(package: str, other: str) -> None:
    """They speak HTTP, as with any other server."""
    assert [file for file, name in imported_by(package) if name == other] == []


def test_help_imports_nothing_heavy() -> None:
    """`tuner --help` answers without torch and its like."""
    code = (
        "import sys; sys.argv = ['tuner', '--help']\n"
        "from tuner.cli import main\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--version" in done.stdout
    assert done.stderr.strip() == "[]"


def test_only_the_load_generator_imports_gevent() -> None:
    """gevent patches the interpreter: it stays in its own process."""
    files = {f for f, name in imported_by("tuner") if name in ("gevent", "locust")}
    assert files == {p.name for p in (ROOT / "tuner" / "loadgen").glob("*.py")} & files
