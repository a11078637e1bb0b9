"""Which CUDA graphs to capture: pure arithmetic, tested without a GPU."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engines.graphs import batch_weights, capture_sizes, fitting


def padding(weights: dict[int, float], sizes: tuple[int, ...]) -> float:
    """The plain definition: pictures computed for nobody."""
    total = 0.0
    for size, weight in weights.items():
        total += weight * (min(s for s in sizes if s >= size) - size)
    return total


@given(st.dictionaries(st.integers(1, 9), st.floats(0, 10), max_size=9), st.integers(1, 4))
def test_no_choice_wastes_less(weights: dict[int, float], most: int) -> None:
    """As good as the best of all choices tried one by one."""
    chosen = tuple(capture_sizes(weights, 9, most))
    assert len(chosen) <= most
    assert chosen[-1] == 9
    others = ((*some, 9) for count in range(most) for some in combinations(range(1, 9), count))
    assert padding(weights, chosen) == pytest.approx(min(padding(weights, o) for o in others))


@pytest.mark.parametrize("mean", [None, 1.0, 3.5, 40.0])
@pytest.mark.parametrize("largest", [1, 8, 64])
def test_every_batch_fits(mean: float | None, largest: int) -> None:
    """The largest size is always captured."""
    sizes = capture_sizes(batch_weights(mean, largest), largest)
    assert all(fitting(sizes, size) is not None for size in range(1, largest + 1))
    assert fitting(sizes, largest + 1) is None


def test_sizes_gather_where_batches_are_expected() -> None:
    """A mean batch of 5 of at most 64: most graphs are small ones."""
    sizes = capture_sizes(batch_weights(5.0, 64), 64)
    assert sum(size <= 12 for size in sizes) >= len(sizes) - 2


def test_a_batch_runs_in_the_next_larger_graph() -> None:
    """Or in its own."""
    assert [fitting([1, 4, 8], size) for size in (1, 2, 4, 5, 9)] == [1, 4, 4, 8, None]
