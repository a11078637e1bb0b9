"""The graph that every engine runs: from the bytes of pictures to logits, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from serving.models import Model
from serving.pixels import PixelSpec

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INPUT, OUTPUT = "pixels", "logits"  # names in ONNX files
# A batch dimension that is exported with an example of one picture would be fixed to one.
EXAMPLE_BATCH = 2
# The most that a server's `max_batch_size` may be.
LARGEST_BATCH = 1024


class Network(nn.Module):
    """uint8 pixels (b, height, width, 3) -> fp32 logits (b, classes).

    Normalising here leaves a quarter of the bytes to move, and lets compilers fuse it.
    """

    def __init__(self, model: nn.Module, spec: PixelSpec, precision: str) -> None:
        super().__init__()
        self.training = False  # not `eval()`, which an exported graph does not have
        self.dtype = DTYPES.get(precision, torch.float32)
        self.model = model.to(self.dtype)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (spec.mean, spec.std))
        # x / 255 normalised is x * scale + shift: one pass over the batch.
        self.scale: torch.Tensor
        self.shift: torch.Tensor
        self.register_buffer("scale", 1 / (255 * std))
        self.register_buffer("shift", -mean / std)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        # Pixels in HWC order seen as CHW are channels last already: no copy. The conversion comes
        # first because it is all that TensorRT does with bytes.
        x = pixels.float().permute(0, 3, 1, 2) * self.scale + self.shift
        logits: torch.Tensor = self.model(x.to(self.dtype))
        return logits.float()


def build_network(model: Model, precision: str, *, channels_last: bool) -> Network:
    """The network on the CPU, ready to be moved, exported or run."""
    network = Network(model.module, model.spec, precision)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    return network.to(memory_format=torch.channels_last) if channels_last else network


def example(spec: PixelSpec, device: str = "cpu") -> torch.Tensor:
    """Pixels to trace with."""
    shape = (EXAMPLE_BATCH, spec.crop, spec.crop, 3)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def dynamic_batch() -> tuple[dict[int, Any]]:
    """The dynamic shapes of the network's one input, for torch.export."""
    return ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)


def write_onnx(network: Network, spec: PixelSpec, path: Path) -> None:
    """Export with input `pixels` and output `logits`, the batch dynamic, weights inside.

    Raises:
        Exception: of many kinds, for a model that torch.export cannot trace.
    """
    program: Any = network
    bf16 = network.dtype == torch.bfloat16
    if bf16:  # TensorRT's importer has no hard-swish in bf16: written out
        exported = torch.export.export(network, (example(spec),), dynamic_shapes=dynamic_batch())
        program = exported.run_decompositions()
    onnx: Any = torch.onnx.export(
        program,
        (example(spec),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=dynamic_batch(),
        dynamo=True,
        optimize=not bf16,
        verbose=False,
    )
    if bf16:  # the whole optimiser would fold batch normalisation into weights of fp32
        import onnxscript.optimizer

        onnxscript.optimizer.fold_constants(onnx.model)
    onnx.save(str(path), external_data=False)
