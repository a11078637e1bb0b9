"""What a model wants to see."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Pixels = NDArray[np.uint8]
Side = Annotated[int, Ge(1), Le(4096)]
Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PixelSpec:
    """The short side resized to `resize`, the centre `crop` x `crop` cut out, values of 0 to 1
    normalised by mean and standard deviation of red, green and blue."""

    resize: Side = 256
    crop: Side = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
