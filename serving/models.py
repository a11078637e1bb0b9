"""The model that is served, from any of three sources, and the pictures that it expects.

- a torchvision classification model by name, with a state_dict or with random weights;
- a file: `.pt2` from torch.export, or TorchScript (`.pt`, `.ts`). It takes normalised pictures,
  float (b, 3, height, width) with a free batch size, and gives logits (b, classes);
- `package.module:factory`: a callable without arguments that returns such an nn.Module. It may
  carry `input_spec`, a mapping with keys of `PixelSpec`, and `preprocess`, a callable from the
  bytes of a picture to uint8 (crop, crop, 3), which `preprocessing: model` uses.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from serving.errors import SettingsError, StartError
from serving.pixels import PixelSpec

if TYPE_CHECKING:
    from torch import nn

    from serving.settings import Settings

# Random weights are the same in every process: two executors must answer alike.
WEIGHTS_SEED = 0
TORCHSCRIPT_ENDINGS = (".pt", ".ts", ".torchscript")


@dataclass(frozen=True)
class Model:
    """A model in evaluation mode on the CPU, in fp32.

    Args:
        module: float (b, 3, crop, crop), normalised -> logits (b, classes).
        exportable: whether torch.export can trace it; a TorchScript file cannot be traced again.
        preprocess: the model's own, if it has one.
    """

    name: str
    module: nn.Module
    spec: PixelSpec
    exportable: bool = True
    preprocess: Callable[[bytes], Any] | None = None

    @property
    def sha256(self) -> str:
        """A hash of every parameter and buffer by name, and of the expected pictures."""
        digest = hashlib.sha256(repr(self.spec).encode())
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().flatten().view(_bytes_type()).numpy().tobytes())
        return digest.hexdigest()


def source_of(name: str) -> str:
    """`file`, `factory` or `torchvision`: what kind of name it is."""
    if name.endswith((".pt2", *TORCHSCRIPT_ENDINGS)):
        return "file"
    return "factory" if ":" in name else "torchvision"


def check(settings: Settings) -> None:
    """Find out without loading weights whether the model can exist.

    Raises:
        SettingsError: it cannot, with the closest match.
    """
    name = str(settings.model)
    source = source_of(name)
    if source == "torchvision":
        _check_name(name)
    elif settings.weights is not None:
        raise SettingsError(f"weights: {name} brings its own; leave weights out.")
    if source == "file" and not Path(name).is_file():
        raise SettingsError(f"model: {name} is not a file. Give the path of a .pt2 or TorchScript.")


def load(settings: Settings) -> Model:
    """The model that resolved settings name.

    Raises:
        SettingsError: no such model, file or factory.
        StartError: it does not load, or the weights do not fit it.
    """
    check(settings)
    name = str(settings.model)
    source = source_of(name)
    model = {"torchvision": _from_zoo, "file": _from_file, "factory": _from_factory}[source](
        name, settings.weights
    )
    return model if settings.input is None else replace(model, spec=settings.input)


def pixel_spec(settings: Settings) -> PixelSpec:
    """What the model expects to see, without loading weights where that is possible."""
    if settings.input is not None:
        return settings.input
    name = str(settings.model)
    return _zoo_spec(name) if source_of(name) == "torchvision" else _cached(settings).spec


def own_preprocess(settings: Settings) -> Callable[[bytes], Any]:
    """The model's own preprocessing.

    Raises:
        SettingsError: it has none.
    """
    found = _cached(settings).preprocess if source_of(str(settings.model)) == "factory" else None
    if found is None:
        raise SettingsError(
            f"preprocessing: model was asked for, but {settings.model} has none of its own. "
            "Give the factory's module a `preprocess` attribute, or choose torchvision."
        )
    return found


@cache
def identity(settings: Settings) -> str:
    """A name for exactly these weights and pictures, without loading them where that is possible:
    what engines on disk are kept under.

    Raises:
        SettingsError: no such model, file or factory.
        StartError: a factory failed.
    """
    name = str(settings.model)
    source = source_of(name)
    if source == "factory":  # code: only what it makes can be told apart
        return _cached(settings).sha256
    if source == "file":
        return f"{_file_sha256(Path(name))} {settings.input}"
    weights = f"random {WEIGHTS_SEED}"
    if settings.weights is not None:
        if not settings.weights.is_file():
            raise StartError(f"weights: {settings.weights} is not a file.")
        weights = _file_sha256(settings.weights)
    return f"{name} {metadata.version('torchvision')} {weights} {settings.input}"


@cache
def _cached(settings: Settings) -> Model:
    return load(settings)


def _check_name(name: str) -> None:
    import torchvision.models as zoo

    names = zoo.list_models(module=zoo)
    if name in names:
        return
    near = get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "See torchvision.models.list_models()."
    raise SettingsError(
        f"model: {name!r} is not a torchvision classification model. {hint} "
        "A .pt2 or TorchScript file and package.module:factory are accepted too."
    )


def _zoo_spec(name: str) -> PixelSpec:
    """Sizes and normalisation from torchvision's own description of the model's weights."""
    import torchvision.models as zoo

    preset = zoo.get_model_weights(name).DEFAULT.transforms()
    return PixelSpec(preset.resize_size[0], preset.crop_size[0], tuple(preset.mean),
                     tuple(preset.std))  # fmt: skip


def _from_zoo(name: str, weights: Path | None) -> Model:
    import torchvision.models as zoo

    # Inception and GoogLeNet would otherwise spend a minute on truncated normal weights.
    extra = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    module: nn.Module = zoo.get_model(name, weights=None, **extra).eval()
    if weights is None:
        _randomise(module)
    else:
        _read_weights(module, weights, name)
    return Model(name, module, _zoo_spec(name))


def _randomise(module: nn.Module) -> None:
    """Random weights that keep the signal's size through every layer.

    Torchvision's own draw counts a depthwise convolution's inputs too often, so that the signal
    fades layer by layer to 1e-9: half precision would then be judged on nothing. Variance
    2 / fan-in is He et al., "Delving Deep into Rectifiers", ICCV 2015, equation 10.
    """
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(WEIGHTS_SEED)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            with torch.no_grad():
                layer.weight.normal_(0, math.sqrt(2 / fan_in), generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()


def _read_weights(module: nn.Module, path: Path, name: str) -> None:
    import torch

    if not path.is_file():
        raise StartError(f"weights: {path} is not a file. Give a state_dict saved by torch.")
    try:
        module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises a dozen kinds for a file that is not its own
        raise StartError(f"weights: {path} does not fit {name}: {_first_line(error)}") from error


def _from_file(name: str, _: Path | None) -> Model:
    import torch

    try:
        if name.endswith(".pt2"):
            loader: Any = torch.export.load  # untyped in torch
            # The graph was exported for inference; `eval` does not exist on it.
            return Model(name, loader(name).module(), PixelSpec())
        with warnings.catch_warnings():
            # Users have such files, whatever torch thinks of the format's future.
            warnings.simplefilter("ignore")
            script: Any = torch.jit.load  # untyped as well
            module = script(name, map_location="cpu")
        return Model(name, module.eval(), PixelSpec(), exportable=False)
    except Exception as error:  # zip, JSON, and a dozen kinds of torch's own
        raise StartError(f"model: {name} cannot be loaded: {_first_line(error)}") from error


def _from_factory(name: str, _: Path | None) -> Model:
    module_name, attribute = name.split(":", 1)
    if "" not in sys.path:  # `python -m` has it, a console script has not
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"model: {name} cannot be imported: {error}.") from error
    try:
        module = factory().eval()
        spec = TypeAdapter(PixelSpec).validate_python(getattr(module, "input_spec", {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StartError(f"model: {name}: input_spec: {where}: {first['msg'].lower()}") from error
    except Exception as error:  # the user's code may raise anything
        raise StartError(f"model: {name} failed: {type(error).__name__}: {error}") from error
    return Model(name, module, spec, preprocess=getattr(module, "preprocess", None))


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
