"""The command line: `tuner run`, `serve`, `show`, `export`."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from tuner import __version__
from tuner.durations import DurationType
from tuner.errors import TunerError, UsageError

OBJECTIVES = ("utilization", "efficiency", "gpu-util")
SEARCHES = ("prior", "tpe", "gp", "random", "grid")
DEFAULT_STORAGE = "studies/tuner.db"
INTERRUPTED, TERMINATED = 130, 143


class Terminated(BaseException):
    """SIGTERM arrived: clean up and end, as after Ctrl-C."""


def storage_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--storage`, the same for every command that reads or writes studies."""
    return click.option(
        "--storage",
        default=DEFAULT_STORAGE,
        show_default=True,
        envvar=["TUNER_STORAGE", "OPTUNA_STORAGE"],
        help="SQLite file, or a URL such as postgresql://user@host/database.",
    )(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`: one document on standard output, on failure too."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Find the serving configuration that gets the most useful work out of a device while P99
    stays inside its budget."""


def _read_study_file(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Make the study file's values the defaults of every other flag."""
    if value is not None:
        from tuner.studyfile import StudyFile

        ctx.default_map = {**(ctx.default_map or {}), **StudyFile.load(value)}
    return value


@cli.command("run", context_settings={"auto_envvar_prefix": "TUNER"})
@click.option(
    "--study", is_eager=True, callback=_read_study_file, metavar="FILE|NAME",
    help="Study file whose values stand in for flags that are not given.",
)  # fmt: skip
@click.option(
    "--p99-budget", type=DurationType(), required=True,
    help="Upper bound on the 99th percentile of response time, such as 100ms.",
)  # fmt: skip
@click.option(
    "--qps", type=click.FloatRange(min=0, min_open=True),
    help="Rate that must be sustained, requests/s. Without it there is no floor.",
)  # fmt: skip
@click.option("--model", help="Torchvision name, .pt2 or TorchScript file, package.module:factory.")
@click.option("--weights", type=click.Path(path_type=Path), help="Weights file; random without.")
@click.option("--payloads", type=click.Path(path_type=Path), help="Folder of images to send.")
@click.option("--space", default="default", show_default=True, help="Search space, file or name.")
@click.option(
    "--objective", type=click.Choice(OBJECTIVES), default="utilization", show_default=True,
    help="What to optimise among configurations that meet the budget.",
)  # fmt: skip
@click.option(
    "--min-agreement", type=click.FloatRange(0, 1), default=0.99, show_default=True,
    help="Share of payloads that must get the class of the fp32 eager reference.",
)  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), help="Trials of the study altogether.")
@click.option(
    "--time-budget", type=DurationType(), default="4m", show_default=True,
    help="Wall clock of this run, set-up and confirmation included.",
)  # fmt: skip
@click.option("--device", help="cpu, cuda or cuda:N; by default a GPU if there is one.")
@click.option(
    "--server", type=click.Path(path_type=Path), metavar="FILE",
    help="Server settings to start from; they are the defaults to beat.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--search", type=click.Choice(SEARCHES), default="prior", show_default=True)
@click.option("--study-name", help="Name in the storage; by default made from the settings.")
@storage_option
@json_option
def run_command(as_json: bool, **given: Any) -> None:
    """Search for the best configuration inside the P99 budget."""
    from tuner.objective import Objective
    from tuner.run import run
    from tuner.settings import RunSettings

    given.pop("study")
    server = _server_settings(given.pop("server"), **_taken(given, "model", "weights", "device"))
    objective = Objective(given.pop("objective"))
    settings = RunSettings(
        p99_budget_s=given.pop("p99_budget"),
        time_budget_s=given.pop("time_budget"),
        objective=objective,
        server=server,
        **given,
    )
    outcome = run(settings)
    if as_json:
        click.echo(json.dumps({**outcome.document, "exit_code": outcome.exit_code}))
    else:
        from tuner.report import print_report

        print_report(outcome.document, outcome.results, _wide_console())
    sys.exit(outcome.exit_code)


@cli.command("serve")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 8000 by default.")
def serve_command(file: Path, host: str | None, port: int | None) -> NoReturn:
    """Start the reference server from a settings file or an exported configuration."""
    command = [sys.executable, "-m", "serving", "--config", str(file)]
    command += ["--host", host] if host else []
    command += ["--port", str(port)] if port is not None else []
    os.execv(sys.executable, command)


@cli.command("devices")
@click.option("--device", help="cpu, cuda or cuda:N; by default a GPU if there is one.")
@click.option("--model", help="Torchvision name, .pt2 or TorchScript file, package.module:factory.")
@json_option
def devices_command(device: str | None, model: str | None, as_json: bool) -> None:
    """Say what this device and installation can do, and why not for the rest."""
    from tuner.devices import abilities, page

    described = abilities(_server_settings(None, device=device, model=model))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **described}))
    else:
        _wide_console().print(page(described))


@cli.command("show")
@click.argument("study", required=False)
@click.option("--trial", type=int, help="Everything about one trial.")
@storage_option
@json_option
def show_command(study: str | None, trial: int | None, storage: str, as_json: bool) -> None:
    """Show a study, by default the latest, or one trial of it."""
    from tuner.show import show

    with _existing_store(storage) as store:
        shown = show(store, study, trial)
    if as_json:
        click.echo(json.dumps(shown.document))
    else:
        _wide_console().print(shown.page)


@cli.command("export")
@click.argument("study", required=False)
@click.option("--trial", type=int, help="Export this trial instead of the winner.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write.")
@click.option("--force", is_flag=True, help="Export a configuration that does not meet the budget.")
@storage_option
@json_option
def export_command(
    study: str | None, trial: int | None, output: Path | None, force: bool, storage: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Write a configuration with its evidence; `tuner serve` runs the file as it is."""
    from tuner.export import to_yaml, write_atomically
    from tuner.show import chosen

    with _existing_store(storage) as store:
        document = chosen(store, study, trial, force=force)
    text = json.dumps(document, indent=2) + "\n" if as_json else to_yaml(document)
    if output is None:
        click.echo(text, nl=False)
        return
    write_atomically(output, text)
    click.echo(f"Wrote {output}. Start it: tuner serve {output}", err=True)


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given.pop(name) for name in names}


def _server_settings(file: Path | None, **flags: Any) -> dict[str, Any]:
    """The server file's settings, or an export's, with flags over them."""
    from tuner.data import load_yaml, plain

    settings: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise UsageError(f"--server: {file} is not a file.", hint="Give a YAML settings file.")
        settings = plain(load_yaml(file))
        settings = dict(settings.get("server", settings))
    given = {k: str(v) for k, v in flags.items() if v is not None}
    return {**settings, **given}


def _existing_store(storage: str) -> Any:
    """Open a storage to read; a missing file is an error, not an empty new database."""
    from tuner.store import Store

    path = Path(storage.removeprefix("sqlite:///"))
    if "://" not in str(path) and not path.exists():
        raise UsageError(
            f"--storage: {path} does not exist.",
            hint="Run tuner run first, or name the file or URL that it used.",
        )
    return Store.open(storage)


def _wide_console() -> Any:
    """A console for standard output that does not cut tables off a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=170)


def main() -> NoReturn:
    """Run the command line; every ending has its exit code."""
    _install_signals()
    as_json = "--json" in sys.argv
    try:
        cli.main(standalone_mode=False)
        sys.exit(0)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        _fail(error.exit_code, "usage", error.format_message(), None, as_json, shown=error.show)
    except TunerError as error:
        _fail(error.exit_code, error.code, error.message, error.hint, as_json)
    except (KeyboardInterrupt, click.Abort):
        _fail(INTERRUPTED, "interrupted", "Interrupted.", None, as_json)
    except Terminated:
        _fail(TERMINATED, "terminated", "Terminated.", None, as_json)
    except Exception as error:
        if not as_json:
            raise  # a defect of ours: the traceback is what its report needs
        traceback.print_exc()
        _fail(1, "unexpected", f"{type(error).__name__}: {error}", None, as_json)


def _fail(
    exit_code: int,
    code: str,
    message: str,
    hint: str | None,
    as_json: bool,
    shown: Callable[[], None] | None = None,
) -> NoReturn:
    if as_json:
        error = {"code": code, "message": message, "hint": hint}
        click.echo(json.dumps({"schema_version": 1, "error": error, "exit_code": exit_code}))
    elif shown is not None:
        shown()
    else:
        click.echo("\n".join(filter(None, (f"Error: {message}", hint))), err=True)
    sys.exit(exit_code)


def _install_signals() -> None:
    """Ctrl-C once cleans up, twice ends at once: the children end with this process either way."""

    def once(signum: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated

    signal.signal(signal.SIGINT, once)
    signal.signal(signal.SIGTERM, once)
