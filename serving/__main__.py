"""`python -m serving`: start the server, or say what it would be."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from serving.errors import StartError
from serving.settings import Settings, load, validated


def main() -> int:
    """Parse, start, serve, drain; every ending has its exit code."""
    options = _options()
    try:
        settings = _settings(options)
        if options.describe:
            from serving.capabilities import describe

            print(json.dumps(describe(settings)))
            return 0
        from serving.front import serve

        return serve(settings, options.fd)
    except StartError as error:
        print(f"serving: {error}", file=sys.stderr)
        return error.exit_code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serving", description="Inference server.")
    parser.add_argument("--config", type=Path, help="settings or exported configuration, YAML")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on; 0 for any free one")
    parser.add_argument("--fd", type=int, help="inherited listening socket, instead of a port")
    parser.add_argument("--describe", action="store_true", help="print what the server would be")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    settings = load(options.config) if options.config else Settings()
    given = {k: v for k in ("host", "port") if (v := getattr(options, k)) is not None}
    return validated({**settings.model_dump(exclude_unset=True), **given}, "command line")


if __name__ == "__main__":
    sys.exit(main())
