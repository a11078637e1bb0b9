"""What every engine promises, whatever it runs on."""

from __future__ import annotations

import numpy as np
import pytest

from serving.engines import Engine
from serving.pixels import Pixels

Logits = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def pictures(count: int, side: int = 224, seed: int = 0) -> Pixels:
    """Noise with a colour of its own for each picture."""
    rng = np.random.default_rng(seed)
    tint = rng.integers(0, 200, (count, 1, 1, 3))
    return (tint + rng.integers(0, 55, (count, side, side, 3))).astype(np.uint8)


class EngineContract:
    """Subclasses give an `engine`, and `reference` logits of `pictures(6)` where there are some."""

    tolerance = 1e-3  # relative error of the logits' norm

    @pytest.fixture
    def reference(self) -> Logits | None:
        return None

    def test_one_row_for_each_picture(self, engine: Engine) -> None:
        """Any batch size, in fp32, with the device's time."""
        for size in (1, 2, 5):
            output = engine.run(pictures(size), 1)
            assert output.logits.shape[0] == size
            assert output.logits.dtype == np.float32
            assert output.busy_s > 0
            assert output.ran >= size

    def test_the_input_is_left_alone(self, engine: Engine) -> None:
        """Slots are shared: nothing is normalised in place."""
        batch = pictures(2)
        engine.run(batch, 1)
        np.testing.assert_array_equal(batch, pictures(2))

    def test_answers_belong_to_their_caller(self, engine: Engine) -> None:
        """The next batch does not change the last one's logits."""
        first = engine.run(pictures(3), 1).logits
        before = first.copy()
        engine.run(pictures(3, seed=1), 1)
        np.testing.assert_array_equal(first, before)

    def test_agrees_with_the_reference(self, engine: Engine, reference: Logits | None) -> None:
        """The same classes, and logits within the tolerance of the precision."""
        if reference is None:
            pytest.skip("no model behind it")
        logits = engine.run(pictures(len(reference)), 1).logits
        error = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
        assert error < self.tolerance
        assert (logits.argmax(1) == reference.argmax(1)).all()

    def test_batch_mates_do_not_matter(self, engine: Engine) -> None:
        """A picture gets the same answer alone and in company."""
        batch = pictures(4)
        together, alone = engine.run(batch, 1).logits, engine.run(batch[2:3], 1).logits
        np.testing.assert_allclose(together[2:3], alone, rtol=0.05, atol=0.05)
