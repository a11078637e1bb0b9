"""From logits to what a client is told."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOP = 5


def best_classes(
    logits: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The five best classes of each row (fewer where the model has fewer), best first, and their
    softmax probabilities; both of shape (b, 5)."""
    k = min(TOP, logits.shape[1])
    # The k best in any order first: sorting a thousand classes costs ten times as much.
    some = np.argpartition(logits, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(logits, some, axis=1), axis=1, kind="stable")
    classes = np.take_along_axis(some, order, axis=1).astype(np.int64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    return classes, np.take_along_axis(probabilities, classes, axis=1).astype(np.float32)
