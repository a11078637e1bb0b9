"""Which batch sizes to capture as CUDA graphs, and which graph a batch runs in.

Pure: decided and tested without a GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

# Each graph holds its own activations, and capturing takes about a second.
MOST_GRAPHS = 8


def capture_sizes(
    weights: Mapping[int, float], max_batch: int, most: int = MOST_GRAPHS
) -> list[int]:
    """The at most `most` sizes that waste the fewest expected padded pictures; the last of them is
    `max_batch`, so that every batch fits.

    Args:
        weights: how likely each batch size from 1 to max_batch is; missing ones never happen.
    """
    share, members = [0.0], [0.0]  # of batches up to a size: how many, and pictures in them
    for size in range(1, max_batch + 1):
        weight = weights.get(size, 0.0)
        share.append(share[-1] + weight)
        members.append(members[-1] + size * weight)

    def padding(above: int, size: int) -> float:
        """Of the batches larger than `above`, run at `size`."""
        return size * (share[size] - share[above]) - (members[size] - members[above])

    # best[size]: least padding of batches up to it with the sizes so far, the last of them `size`.
    best = [(0.0, [0])] + [(padding(0, j), [j]) for j in range(1, max_batch + 1)]
    chosen = best[max_batch]
    for _ in range(most - 1):
        best = [
            min((best[i][0] + padding(i, j), [*best[i][1], j]) for i in range(j)) if j else best[0]
            for j in range(max_batch + 1)
        ]
        chosen = min(chosen, best[max_batch], key=lambda option: option[0])
    return [size for size in chosen[1] if size]


def fitting(sizes: Sequence[int], batch: int) -> int | None:
    """The smallest captured size that holds the batch; None if it holds no such."""
    place = bisect_left(sizes, batch)
    return sizes[place] if place < len(sizes) else None


def batch_weights(mean: float | None, max_batch: int) -> dict[int, float]:
    """The expected distribution of batch sizes.

    One request starts a batch and a Poisson number of others joins it, cut at the maximum (the
    window timer's distribution). Without an expectation each power of two is as likely as the next.
    """
    if mean is None:
        return {size: 1.0 / size for size in range(1, max_batch + 1)}
    joining = max(mean - 1, 0.05)
    weights = {
        1 + n: math.exp(n * math.log(joining) - joining - math.lgamma(n + 1))
        for n in range(max_batch)
    }
    weights[max_batch] += max(1 - sum(weights.values()), 0.0)
    return weights
