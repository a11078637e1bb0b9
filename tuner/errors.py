"""What can go wrong for a user, each kind with the exit code that `tuner` ends with."""

from __future__ import annotations


class TunerError(Exception):
    """Something the user can act on: a message, and optionally one hint what to do.

    `code` is the stable name in `--json` output, `exit_code` the process's exit status.
    """

    exit_code = 1
    code = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(TunerError):
    """A flag, file or input that cannot be used as given."""

    exit_code = 2
    code = "usage"


class ServerStartError(TunerError):
    """The server under test could not be started at all."""

    exit_code = 3
    code = "server_start"


class NothingMeetsError(TunerError):
    """The search finished and no configuration met the budget."""

    exit_code = 4
    code = "nothing_meets"


class MeasurementError(TunerError):
    """The measurements cannot be trusted: generator saturated, host or device disturbed."""

    exit_code = 5
    code = "measurement"
