"""From an encoded image to the pixels of the model's crop: uint8, height x width x 3.

`torchvision` decodes and resizes with torchvision's own code; `pil` is the slow baseline that many
services start from; `dali` works a batch at a time in the executor (`serving.decoding`). All give
the same pixels within a few steps (a test holds them to it).
Normalisation is left to the executor: bytes are a quarter of the traffic.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from serving.errors import BadImage, EngineFailure, TooLarge
from serving.pixels import Pixels, PixelSpec
from serving.settings import Settings

# torchvision 0.29 announces that its decoders will move to TorchCodec, whose wheels need FFmpeg on
# the system. Until they go they are the fastest decoder that a plain installation has.
warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
# Pixels are checked against the server's own bound before anything is decoded.
Image.MAX_IMAGE_PIXELS = None


Preprocess = Callable[[bytes, PixelSpec], Pixels]


def check_size(data: bytes, max_pixels: int) -> None:
    """Read the header only.

    Raises:
        BadImage: not an image.
        TooLarge: more pixels than allowed, so that a small file cannot fill the memory.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise BadImage("the body is not an image that can be decoded") from error
    if width * height > max_pixels:
        raise TooLarge(
            f"the image has {width} x {height} pixels; at most {max_pixels} are accepted"
        )


def with_torchvision(data: bytes, spec: PixelSpec) -> Pixels:
    """Decode, resize the short side with antialiasing, crop the centre."""
    import torch  # late: a synthetic server starts without it
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        image = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:  # a format that only Pillow reads, or no image at all
        return with_pil(data, spec)
    resized = functional.resize(image, [spec.resize], antialias=True)
    cropped = functional.center_crop(resized, [spec.crop, spec.crop])
    pixels: Pixels = cropped.permute(1, 2, 0).numpy()  # a view: the caller copies it
    return pixels


def with_pil(data: bytes, spec: PixelSpec) -> Pixels:
    """The same in Pillow."""
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise BadImage("the image is damaged or of an unknown kind") from error
    width, height = upright.size
    short = min(width, height)
    # The long side is truncated, as torchvision does.
    size = (int(spec.resize * width / short), int(spec.resize * height / short))
    resized = upright.resize(size, Image.Resampling.BILINEAR)
    left, top = (round((side - spec.crop) / 2) for side in size)
    return np.asarray(resized.crop((left, top, left + spec.crop, top + spec.crop)))


KINDS: dict[str, Preprocess] = {"torchvision": with_torchvision, "pil": with_pil}


def preprocess_of(settings: Settings) -> Preprocess:
    """What a worker does with a picture.

    Raises:
        SettingsError: the model's own was asked for, and it has none.
    """
    if settings.preprocessing != "model":
        # `dali` decodes in the executor; a synthetic one has none, and its workers stand in.
        return KINDS.get(settings.preprocessing, with_torchvision)
    from serving.models import own_preprocess

    own = own_preprocess(settings)

    def with_model(data: bytes, spec: PixelSpec) -> Pixels:
        try:
            pixels = np.asarray(own(data))
        except Exception as error:  # the user's code; most often the picture is at fault
            raise BadImage(f"the model's preprocessing refused it: {error}") from error
        if pixels.shape != (spec.crop, spec.crop, 3) or pixels.dtype != np.uint8:
            raise EngineFailure(
                f"the model's preprocessing gave {pixels.dtype} {pixels.shape} instead of "
                f"uint8 {(spec.crop, spec.crop, 3)}"
            )
        return pixels

    return with_model
