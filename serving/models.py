"""Torchvision classification models by name, and the pictures that each expects."""

from __future__ import annotations

import hashlib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torchvision.models as zoo

from serving.errors import SettingsError, StartError
from serving.preprocess import PixelSpec

if TYPE_CHECKING:
    from torch import nn

# Random weights are the same in every process: two executors must answer alike.
WEIGHTS_SEED = 0


def check_name(name: str) -> str:
    """The name, if torchvision has such a classification model.

    Raises:
        SettingsError: it has not; with the closest match.
    """
    names = zoo.list_models(module=zoo)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else "See torchvision.models.list_models()."
        raise SettingsError(f"model: {name!r} is not a torchvision classification model. {hint}")
    return name


def pixel_spec(name: str) -> PixelSpec:
    """Sizes and normalisation from torchvision's own description of the model's weights."""
    preset = zoo.get_model_weights(check_name(name)).DEFAULT.transforms()
    return PixelSpec(preset.resize_size[0], preset.crop_size[0], tuple(preset.mean),
                     tuple(preset.std))  # fmt: skip


def load_model(name: str, weights: Path | None) -> nn.Module:
    """The model in evaluation mode on the CPU, in fp32.

    Raises:
        SettingsError: no such model or weights file.
        StartError: the weights do not fit the model, or are not a plain state_dict.
    """
    import torch

    torch.manual_seed(WEIGHTS_SEED)
    # Inception and GoogLeNet would otherwise spend a minute on truncated normal weights.
    extra = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    model: nn.Module = zoo.get_model(check_name(name), weights=None, **extra).eval()
    if weights is not None:
        model.load_state_dict(_read_weights(weights, name))
    return model


def weights_sha256(model: nn.Module) -> str:
    """A hash of every parameter and buffer, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_weights(path: Path, name: str) -> dict[str, object]:
    import torch

    if not path.is_file():
        raise SettingsError(f"weights: {path} is not a file. Give a state_dict saved by torch.")
    try:
        state: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True)
        zoo.get_model(name, weights=None).load_state_dict(state)
    except Exception as error:  # torch raises a dozen kinds for a file that is not its own
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartError(f"weights: {path} does not fit {name}: {text}") from error
    return state
