"""What can go wrong, for whom: with an exit status at start, with an HTTP status afterwards."""

from __future__ import annotations


class StartError(Exception):
    """The server cannot start: exit code 3, or 2 where the settings are at fault."""

    exit_code = 3


class SettingsError(StartError):
    """The settings file cannot be used as given."""

    exit_code = 2


class RequestError(Exception):
    """A request that gets no result: its status, a short message, and more headers."""

    status = 500
    headers: dict[str, str] = {}  # noqa: RUF012 - never written


class BadImage(RequestError):  # noqa: N818 - read as what the client is told
    """The body is not an image that can be decoded: the client's fault, and only this one's."""

    status = 400


class TooLarge(RequestError):  # noqa: N818
    """Body or picture above the bound."""

    status = 413


class Busy(RequestError):  # noqa: N818
    """The queue is full, or the server is not ready or drains."""

    status = 503
    headers = {"Retry-After": "1"}  # noqa: RUF012


class Expired(Busy):
    """The request cannot be answered within its deadline, or was not: refused, not computed."""


class Cancelled(RequestError):  # noqa: N818
    """The client went away; nobody reads this. 499 is nginx's number for it."""

    status = 499


class NotFound(RequestError):  # noqa: N818
    """No model of this name or version."""

    status = 404


class BadRequest(BadImage):
    """The body is not a request of the protocol."""


class EngineFailure(RequestError):  # noqa: N818
    """The model failed on the batch."""

    status = 500
