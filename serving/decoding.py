"""Decoding inside the executor, a batch at a time: NVIDIA DALI.

On a CPU its pipeline decodes and resizes with its own threads; on a GPU nvJPEG decodes in hardware
("mixed") and the pixels never visit the host. Not yet run on a GPU by the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.errors import StartError
from serving.pixels import Pixels, PixelSpec
from serving.settings import Settings

BAD = "the image is damaged or of an unknown kind"
# The ratio is a 32-bit float: a product that should be whole must not fall below it.
WHOLE = 1e-3
Encoded = NDArray[np.uint8]


class Decoder(Protocol):
    """Prepares a batch of encoded pictures."""

    def decode(self, pictures: Sequence[Encoded]) -> tuple[Pixels | Any, dict[int, str]]:
        """Pixels of shape (b, crop, crop, 3), on the host or on the engine's device, zeros for
        pictures that cannot be decoded; and why, by place."""


class DaliDecoder:
    """A pipeline that is fed each batch as it comes.

    Args:
        device_index: of the GPU; None: decode on the CPU.
        threads: of the pipeline.
        max_batch: the most pictures in one batch.
    """

    def __init__(
        self, spec: PixelSpec, *, device_index: int | None, threads: int, max_batch: int
    ) -> None:
        from nvidia.dali import fn, math, pipeline_def, types

        self._crop, self._on_gpu = spec.crop, device_index is not None

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=max_batch, num_threads=threads, device_id=device_index,
            prefetch_queue_depth=1,
        )  # fmt: skip
        def pipeline() -> Any:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, device="cpu")
            image = fn.decoders.image(
                encoded, device="mixed" if self._on_gpu else "cpu", output_type=types.RGB
            )
            # The short side to `resize`, the long one rounded down, as torchvision does.
            shape = fn.peek_image_shape(encoded, dtype=types.FLOAT)
            height, width = shape[0], shape[1]
            scale = spec.resize / math.min(height, width)
            tall = math.floor(height * scale + WHOLE)
            wide = math.floor(width * scale + WHOLE)
            resized = fn.resize(
                image,
                resize_y=tall,
                resize_x=wide,
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
            anchor = fn.stack(centred(tall), centred(wide))
            return fn.slice(
                resized,
                start=fn.cast(anchor, dtype=types.INT32),
                shape=[spec.crop, spec.crop],
                axes=[0, 1],
                out_of_bounds_policy="pad",
            )

        def centred(side: Any) -> Any:
            """Python's round((side - crop) / 2), which torchvision crops at: halves go to the even
            neighbour."""
            spare = side - spec.crop
            fours = math.floor(spare / 4)
            return 2 * fours + math.max(spare - 4 * fours - 1, 0)

        self._pipeline: Any = pipeline()
        self._pipeline.build()

    def decode(self, pictures: Sequence[Encoded]) -> tuple[Pixels | Any, dict[int, str]]:
        try:
            return self._run(pictures), {}
        except RuntimeError:  # one of them; which one is found by decoding each alone
            return self._one_by_one(pictures)

    def _one_by_one(self, pictures: Sequence[Encoded]) -> tuple[Pixels | Any, dict[int, str]]:
        rows, bad = list[Any](), dict[int, str]()
        for place, picture in enumerate(pictures):
            try:
                rows.append(self._run([picture])[0])
            except RuntimeError:
                rows.append(None)
                bad[place] = BAD
        blank = self._blank(next((row for row in rows if row is not None), None))
        return self._stack([blank if row is None else row for row in rows]), bad

    def _run(self, pictures: Sequence[Encoded]) -> Any:
        # The pipeline may still read a batch while the slots are written again: copies.
        self._pipeline.feed_input("encoded", [np.array(p) for p in pictures])
        (output,) = self._pipeline.run()
        if self._on_gpu:
            import torch

            return torch.utils.dlpack.from_dlpack(output.as_tensor()).clone()
        return np.array(output.as_array())

    def _blank(self, like: Any) -> Any:
        shape = (self._crop, self._crop, 3)
        if not self._on_gpu or like is None:
            return np.zeros(shape, np.uint8)
        import torch

        return torch.zeros_like(like)

    def _stack(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], np.ndarray):
            return np.stack(rows)
        import torch

        return torch.stack(rows)


def open_decoder(settings: Settings, spec: PixelSpec) -> Decoder | None:
    """The decoder of an executor, or None where the front end's workers decode.

    Raises:
        StartError: DALI is not installed, or its pipeline cannot be built.
    """
    if settings.preprocessing != "dali" or settings.engine == "synthetic":
        return None
    from serving.capabilities import preprocessing_obstacle, take_facts

    reason = preprocessing_obstacle("dali", take_facts(settings.device))
    if reason is not None:
        raise StartError(f"preprocessing dali: {reason}")
    index = None
    if settings.device.startswith("cuda"):
        index = int(settings.device.partition(":")[2] or 0)
    try:
        # Live changes may raise the maximum: the pipeline takes the most there can be.
        return DaliDecoder(spec, device_index=index, threads=settings.workers, max_batch=1024)
    except RuntimeError as error:
        raise StartError(f"preprocessing dali: {str(error).splitlines()[0]}") from error
