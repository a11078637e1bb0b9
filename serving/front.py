"""The life of the server process: listen, start executors, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from serving.app import create_app
from serving.capabilities import settle
from serving.errors import StartError
from serving.executor import Executor
from serving.protocol import bounded_protocol
from serving.service import Service
from serving.settings import Settings
from serving.slots import anonymous_file


class FrontEnd(uvicorn.Server):
    """Uvicorn, with signals left to us: a drain ends with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings, descriptor: int | None) -> int:
    """Run until a signal or a failure; the exit code.

    Args:
        descriptor: an inherited listening socket, instead of the settings' host and port.

    Raises:
        StartError: the port is in use, or the executors cannot run.
    """
    listener = _listener(settings, descriptor)
    memory = anonymous_file()
    executors = [Executor(settings.engine, memory) for _ in range(_processes(settings))]
    try:
        settled = settle(settings)
    except BaseException:
        executors.clear()  # their sockets close with them, and so they end
        raise
    wanted = _processes(settled)
    executors += [Executor(settings.engine, memory) for _ in range(wanted - len(executors))]
    del executors[wanted:]
    if settled.engine != "synthetic":
        _import_ahead()
    service = Service(settled, executors, memory)
    app = create_app(service, os.environ.get("SERVING_ADMIN_TOKEN"))
    server = FrontEnd(
        uvicorn.Config(
            app,
            http=bounded_protocol(settled),
            lifespan="off",
            access_log=False,
            log_level="warning",
            backlog=2048,
            timeout_keep_alive=max(round(settled.idle_timeout_s), 1),
            timeout_graceful_shutdown=max(round(settled.drain_s), 1),
        )
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(service, server, listener))


async def _live(service: Service, server: FrontEnd, listener: socket.socket) -> int:
    """Serve from the first moment (not ready), until told to stop or an executor dies."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        service.draining = server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    working = asyncio.ensure_future(_work(service, listener))
    try:
        await asyncio.wait((serving, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return 0
        print(f"serving: {working.result()}", file=sys.stderr)
        return 1
    finally:
        working.cancel()
        server.should_exit = True
        await serving
        await service.stop()


async def _work(service: Service, listener: socket.socket) -> str:
    """Start the executors, then wait for one to die; what happened to it."""
    await service.start()
    settings, (host, port, *_) = service.settings, listener.getsockname()
    print(
        f"serving: {settings.model} on {settings.device}, {settings.engine} {settings.precision}, "
        f"ready at http://{host}:{port}",
        file=sys.stderr,
    )
    return await service.wait_failed()


def _processes(settings: Settings) -> int:
    """How many executor processes: one for each instance on a CPU, where each runs one batch at a
    time; one for each GPU, where instances are lanes that share the model."""
    return sum(
        1 if device.startswith("cuda") else settings.instances for device in settings.devices
    )


def _import_ahead() -> None:
    """What the first request would otherwise wait for."""
    import torch
    import torchvision.io
    import torchvision.transforms.v2  # noqa: F401

    # Workers are threads already; with OpenMP pools of their own they would fight the executors.
    torch.set_num_threads(1)


def _listener(settings: Settings, descriptor: int | None) -> socket.socket:
    """The inherited socket, or a new one; bound before the model is loaded, so that a port in use
    is known at once."""
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}. "
            f"Choose another --port, or end what uses this one."
        ) from error
    return listener
