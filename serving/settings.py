"""The server's settings: one frozen object, validated once, with one message for each mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from serving.errors import SettingsError
from serving.pixels import PixelSpec

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
EngineName = Literal["eager", "compile", "cudagraph", "tensorrt", "onnxruntime", "synthetic"]
PreprocessingName = Literal["torchvision", "pil", "dali", "model"]
# How an idle executor is chosen; `round_robin` exists to be compared with, never to be served.
DispatchName = Literal["least_loaded", "round_robin"]
ONE_DEVICE = r"(cpu|cuda(:\d+)?)"
# Top-level keys of an exported configuration; `server` holds the settings, the rest is evidence.
DOCUMENT_KEYS = {"schema_version", "kind", "server", "evidence", "provenance"}
SCHEMA_VERSION = 1
# What changes on a running server.
LIVE = ("batch_window_ms", "max_batch_size", "queue_capacity")


class Synthetic(BaseModel):
    """The synthetic engine sleeps base_ms + per_item_ms x batch size, longer by `contention` for
    each other instance at work, and by up to `jitter` of it at random; divided by the `speeds` of
    its device, where there are several."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_ms: float = Field(4.0, ge=0, le=60_000)
    per_item_ms: float = Field(0.5, ge=0, le=60_000)
    contention: float = Field(0.0, ge=0, le=100)
    jitter: float = Field(0.0, ge=0, le=100)
    speeds: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()


class Guard(BaseModel):
    """The accuracy guard: answers are compared with the fp32 eager reference's when an engine
    loads. Without samples there is nothing to compare and no guard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: Path | None = None  # a folder of images
    min_agreement: float = Field(0.99, ge=0, le=1)  # share of samples with the same best class


class Settings(BaseModel):
    """Everything that a server can be told. `None`: chosen for the device, see `resolved`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None  # torchvision name, .pt2 or TorchScript file, package.module:factory
    weights: Path | None = None  # a state_dict; None: random weights, always the same
    input: PixelSpec | None = None  # None: what the model says of itself
    # One device, or several with commas; each has executors of its own.
    device: str = Field("auto", pattern=rf"^(auto|{ONE_DEVICE}(,{ONE_DEVICE})*)$")
    engine: EngineName = "eager"
    precision: Precision = "fp32"
    preprocessing: PreprocessingName = "torchvision"
    workers: int = Field(1, ge=1, le=256)  # preprocessing threads
    instances: int = Field(1, ge=1, le=256)  # batches at work at the same time, on each device
    threads: int | None = Field(None, ge=1, le=256)  # of each executor, on a CPU
    # As other servers ship: no batching until somebody asks for it, because it trades latency for
    # throughput, and by how much is the operator's decision (or the tuner's).
    batch_window_ms: float = Field(0.0, ge=0, le=10_000)
    max_batch_size: int = Field(1, ge=1, le=1024)
    expected_batch: float | None = Field(None, ge=1, le=1024)  # mean; which CUDA graphs to capture
    queue_capacity: int = Field(256, ge=1, le=100_000)  # admitted and not yet dispatched
    dispatch: DispatchName = "least_loaded"
    deadline_ms: float | None = Field(None, gt=0, le=3_600_000)  # of requests that name none
    guard: Guard = Guard()
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    max_body_bytes: int = Field(16 << 20, ge=1)
    max_header_bytes: int = Field(32 << 10, ge=1024, le=64 << 10)
    max_pixels: int = Field(50_000_000, ge=1)  # decoded; 50 megapixels are 150 MB
    receive_timeout_s: float = Field(10.0, gt=0, le=3600)  # from a request's first byte to its last
    idle_timeout_s: float = Field(75.0, gt=0, le=86_400)  # of a connection without a request
    drain_s: float = Field(10.0, ge=0, le=3600)
    synthetic: Synthetic = Synthetic()

    @property
    def devices(self) -> tuple[str, ...]:
        """Each device of the list."""
        return tuple(self.device.split(","))

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with some changed, validated.

        Raises:
            SettingsError: a key or value is not allowed.
        """
        return validated({**self.model_dump(exclude_unset=True), **changes}, "settings")


def load(path: Path) -> Settings:
    """Settings from a YAML file: the bare mapping, or a configuration exported by the tuner.

    Raises:
        SettingsError: unreadable, not a mapping, an unknown key, or a value out of bounds.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except (YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"{path} is not YAML: {problem}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: holds no mapping. Write `key: value` lines.")
    if "server" in document:
        document = _server_part(document, path)
    return validated(document, str(path))


def validated(values: Mapping[str, Any], source: str) -> Settings:
    """Settings from plain values; the first mistake becomes the message."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            near = get_close_matches(key, Settings.model_fields, n=1)
            known = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(_known())}."
            raise SettingsError(f"{source}: {key} is not a setting. {known}") from error
        raise SettingsError(
            f"{source}: {key}: {first['msg'].lower()}, given {first['input']!r}."
        ) from error


def resolved(settings: Settings, *, has_cuda: bool) -> Settings:
    """The settings with everything that depends on the device filled in.

    A CPU is shared with preprocessing: its executors together get half of the cores.
    """
    names = [
        ("cuda:0" if has_cuda else "cpu")
        if name == "auto"
        else "cuda:0"
        if name == "cuda"
        else name
        for name in settings.devices
    ]
    on_gpu = names[0].startswith("cuda")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_cpu = settings.instances * sum(name == "cpu" for name in names)
    return settings.model_copy(
        update={
            "device": ",".join(names),
            "model": settings.model or ("resnet50" if on_gpu else "mobilenet_v3_small"),
            "threads": settings.threads or max(1, (cores or 1) // 2 // max(on_cpu, 1)),
        }
    )


def _server_part(document: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for key in document:
        if key not in DOCUMENT_KEYS:
            raise SettingsError(
                f"{path}: {key} is not a key of a configuration document. "
                f"Known: {', '.join(sorted(DOCUMENT_KEYS))}."
            )
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SettingsError(
            f"{path}: schema_version {version!r}; this server reads version {SCHEMA_VERSION}."
        )
    server = document["server"]
    if not isinstance(server, dict):
        raise SettingsError(f"{path}: server holds no mapping.")
    return server


def _known() -> list[str]:
    return sorted(Settings.model_fields)
