"""Engines on an NVIDIA GPU. Not yet run on one by the project, except where the docs say so.

One process holds a device and its model; `instances` lanes of it run batches at the same time, so
that one lane's copies overlap another's kernels. What a lane does is asynchronous up to the one
wait for the result; a test in tests/gpu holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from serving import models
from serving.engines import Engine, Output, Say, Uncaptured
from serving.engines.compiled import open_compiled
from serving.engines.graphs import batch_weights, capture_sizes, fitting
from serving.engines.network import Network, build_network
from serving.errors import StartError
from serving.pixels import Pixels, PixelSpec
from serving.settings import Settings

# Before a capture: lazy initialisation and cuDNN's choices must be behind it.
WARM_RUNS = 3


class Buffers:
    """One lane's fixed memory: pinned on the host, and on the device, for `size` pictures."""

    def __init__(self, device: torch.device, spec: PixelSpec, size: int, classes: int) -> None:
        shape = (size, spec.crop, spec.crop, 3)
        self.staging = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self.pixels = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.logits = torch.zeros((size, classes), dtype=torch.float32, device=device)
        self.answer = torch.empty((size, classes), dtype=torch.float32, pin_memory=True)


# From how many pictures are in `buffers.pixels` to how many were run; logits in `buffers.logits`.
# Called with the compute stream current; must not wait for the device.
Launch = Callable[[Buffers, int], int]


class CudaLane:
    """Copies and kernels on two streams, ordered by events; one wait a batch."""

    def __init__(self, device: torch.device, buffers: Buffers, launch: Launch) -> None:
        self.buffers, self._launch = buffers, launch
        stream: Any = torch.cuda.Stream  # untyped in torch, as events are
        event: Any = torch.cuda.Event
        self._copy, self.compute = stream(device), stream(device)
        self._began, self._ended = event(enable_timing=True), event(enable_timing=True)

    def run(self, pixels: Pixels | Any, active: int) -> Output:
        size = len(pixels)
        buffers = self.buffers
        if size > len(buffers.pixels):
            raise Uncaptured(f"a batch of {size} is larger than the {len(buffers.pixels)} prepared")
        with torch.inference_mode():
            with torch.cuda.stream(self._copy):
                self._began.record()
                buffers.pixels[:size].copy_(self._staged(pixels), non_blocking=True)
            self.compute.wait_stream(self._copy)
            with torch.cuda.stream(self.compute):
                ran = self._launch(buffers, size)
                buffers.answer[:size].copy_(buffers.logits[:size], non_blocking=True)
                self._ended.record()
        self._ended.synchronize()  # the one wait
        busy_s = self._began.elapsed_time(self._ended) / 1000
        return Output(buffers.answer[:size].numpy().copy(), busy_s, ran)

    def _staged(self, pixels: Pixels | Any) -> torch.Tensor:
        if isinstance(pixels, torch.Tensor):  # decoded on the device, on the current stream
            return pixels
        staged = self.buffers.staging[: len(pixels)]
        np.copyto(staged.numpy(), pixels)
        return staged


def open_cuda(settings: Settings, say: Say) -> list[Engine]:
    """One lane for each instance.

    Raises:
        StartError: the device or its memory cannot hold the model, or the engine cannot be built.
    """
    device = torch.device(settings.device)
    torch.cuda.set_device(device)
    _set_tf32(settings.precision == "tf32")
    try:
        with torch.inference_mode():
            return [*_open(settings, device, say)]
    except (RuntimeError, AssertionError) as error:  # out of memory among them
        raise StartError(f"device {settings.device}: {error}") from error


def _open(settings: Settings, device: torch.device, say: Say) -> list[CudaLane]:
    if settings.engine == "tensorrt":
        return _tensorrt_lanes(settings, device, say)
    model = models.load(settings)
    # Tensor Cores read channels last; plain fp32 convolutions are as fast without.
    channels_last = settings.precision != "fp32"
    if settings.engine == "compile":
        networks: list[Any] = [
            open_compiled(settings, say, channels_last=channels_last)
            for _ in range(settings.instances)
        ]
    else:
        network = build_network(model, settings.precision, channels_last=channels_last).to(device)
        networks = [network] * settings.instances
    classes = _classes(networks[0], model.spec, device)
    lanes = list[CudaLane]()
    for each in networks:
        buffers = Buffers(device, model.spec, settings.max_batch_size, classes)
        lane = CudaLane(device, buffers, _calling(each))
        lanes.append(_captured(lane, device, each, settings, say) if _graphs(settings) else lane)
    return lanes


def _graphs(settings: Settings) -> bool:
    return settings.engine == "cudagraph"


def _calling(network: Callable[[torch.Tensor], torch.Tensor]) -> Launch:
    """Run the network at the batch's own size."""

    def launch(buffers: Buffers, size: int) -> int:
        buffers.logits[:size].copy_(network(buffers.pixels[:size]))
        return size

    return launch


def _captured(
    lane: CudaLane, device: torch.device, network: Network, settings: Settings, say: Say
) -> CudaLane:
    """The lane with one graph a size, the largest first so that the others reuse its memory."""
    sizes = capture_sizes(
        batch_weights(settings.expected_batch, settings.max_batch_size), settings.max_batch_size
    )
    say(f"capturing CUDA graphs for batches of {', '.join(map(str, sizes))}")
    buffers, graphs, pool = lane.buffers, dict[int, Any](), None
    plain = _calling(network)
    for size in reversed(sizes):
        with torch.cuda.stream(lane.compute):
            for _ in range(WARM_RUNS):
                plain(buffers, size)
        torch.cuda.synchronize(device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=lane.compute):
            plain(buffers, size)
        graphs[size], pool = graph, pool or graph.pool()

    def launch(_: Buffers, size: int) -> int:
        captured = fitting(sizes, size)
        if captured is None:
            raise Uncaptured(f"no CUDA graph was captured for a batch of {size}")
        graphs[captured].replay()
        return captured

    return CudaLane(device, buffers, launch)


def _tensorrt_lanes(settings: Settings, device: torch.device, say: Say) -> list[CudaLane]:
    from serving.engines.tensorrt import open_program

    program, spec, classes = open_program(settings, device, say)
    return [
        CudaLane(device, Buffers(device, spec, settings.max_batch_size, classes), program.lane())
        for _ in range(settings.instances)
    ]


def _classes(network: Any, spec: PixelSpec, device: torch.device) -> int:
    one = torch.zeros((1, spec.crop, spec.crop, 3), dtype=torch.uint8, device=device)
    return int(network(one).shape[1])


def _set_tf32(allowed: bool) -> None:
    """Process-wide: each device has a process of its own."""
    mode = "tf32" if allowed else "ieee"
    backends: Any = torch.backends  # attributes that its annotations lack
    backends.cuda.matmul.fp32_precision = mode
    backends.cudnn.conv.fp32_precision = mode
