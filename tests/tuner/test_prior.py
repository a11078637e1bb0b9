"""The closed forms: batch size, floor, stability, what they forbid and what they guess."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.examples import prior
from tuner.calibration import Calibration, ServiceTime


class TestMeanBatch:
    def test_is_one_plus_rate_times_window(self) -> None:
        """A timer that starts at the first request gathers 1 + L W: 1 + 100/s x 10 ms = 2."""
        predicted = prior().predict({"batch_window_ms": 10.0, "max_batch_size": 64}, 100)
        assert predicted.mean_batch == pytest.approx(2.0)
        assert predicted.rate_times_window == pytest.approx(1.0)

    def test_is_cut_at_the_maximum(self) -> None:
        """A window that would gather 21 fills a maximum of 8."""
        predicted = prior().predict({"batch_window_ms": 40.0, "max_batch_size": 8}, 500)
        assert predicted.mean_batch == pytest.approx(8.0, rel=0.01)

    def test_without_a_window_the_backlog_makes_the_batch(self) -> None:
        """The fixed point m = L S(m): 500/s and S = 4 + 0.5 b ms give 2.67."""
        predicted = prior().predict({"batch_window_ms": 0.0, "max_batch_size": 64}, 500)
        assert predicted.mean_batch == pytest.approx(500 * 0.004 / (1 - 500 * 0.0005), rel=0.02)

    @given(rate=st.floats(1, 2000), window=st.floats(0, 100), maximum=st.integers(1, 64))
    def test_is_within_its_bounds(self, rate: float, window: float, maximum: int) -> None:
        """At least one request, at most the maximum, for every setting."""
        point = {"batch_window_ms": window, "max_batch_size": maximum}
        assert 1.0 <= prior().predict(point, rate).mean_batch <= maximum


class TestP99:
    def test_is_infinite_beyond_stability(self) -> None:
        """One worker that needs 2 ms an image cannot serve 600/s."""
        assert prior().predict({"workers": 1}, 600).p99_ms == math.inf

    def test_grows_with_the_window_at_low_load(self) -> None:
        """With nothing else to wait for, ten more milliseconds of window are ten more of P99."""
        short = prior().predict({"batch_window_ms": 20.0, "max_batch_size": 64}, 20)
        long = prior().predict({"batch_window_ms": 30.0, "max_batch_size": 64}, 20)
        assert long.p99_ms - short.p99_ms == pytest.approx(10, abs=1.5)

    def test_is_never_below_the_floor(self) -> None:
        """The floor is a bound, the P99 an estimate above it."""
        for rate in (1, 50, 200, 400):
            predicted = prior().predict({"batch_window_ms": 10.0, "workers": 2}, rate)
            assert predicted.p99_ms >= predicted.floor_ms


class TestCapacity:
    def test_a_larger_batch_holds_more(self) -> None:
        """With a fixed cost a batch, a maximum of 16 serves more than one of 1."""
        p = prior()
        one = p.capacity_rps({"max_batch_size": 1, "workers": 8})
        sixteen = p.capacity_rps({"max_batch_size": 16, "workers": 8})
        assert sixteen > 1.5 * one

    def test_shared_cores_limit_it(self) -> None:
        """On a CPU, decoding and models share the cores."""
        point = {"max_batch_size": 16, "workers": 8, "instances": 2}
        assert prior(shared_cores=2).capacity_rps(point) < prior().capacity_rps(point)

    def test_is_zero_where_the_window_alone_breaks_the_budget(self) -> None:
        """No rate meets 20 ms behind a window of 30 ms that never fills."""
        point = {"batch_window_ms": 30.0, "max_batch_size": 64}
        assert prior(budget_ms=20).capacity_rps(point) < 1


class TestForbids:
    def test_a_window_above_the_budget(self) -> None:
        """The reason names the parts of the floor."""
        reason = prior(budget_ms=20).forbids({"batch_window_ms": 40.0, "max_batch_size": 64}, 100)
        assert reason is not None
        assert "wait 40 ms" in reason
        assert "above 20 ms" in reason

    def test_a_rate_above_stability(self) -> None:
        """A rate that must be held and cannot be is a reason; without one it is none."""
        reason = prior().forbids({"workers": 1}, 700)
        assert reason is not None
        assert "grows without bound" in reason
        assert prior().forbids({"workers": 1}, None) is None

    def test_not_what_might_meet(self) -> None:
        """An ordinary configuration is left to be measured."""
        assert prior().forbids({"batch_window_ms": 5.0, "max_batch_size": 8}, 100) is None


class TestServiceTime:
    def test_interpolates_and_extends(self) -> None:
        """Linear between the measured sizes, the last slope beyond them."""
        time = ServiceTime(1, (1, 4, 8), (0.005, 0.008, 0.016))
        assert time.of(1) == pytest.approx(0.005)
        assert time.of(2.5) == pytest.approx(0.0065)
        assert time.of(16) == pytest.approx(0.032)

    def test_one_size_scales(self) -> None:
        """A single probe is taken as proportional."""
        assert ServiceTime(1, (1,), (0.005,)).of(4) == pytest.approx(0.02)

    def test_the_ceiling_is_the_best_of_all(self) -> None:
        """Max of k b / S(b) over instances and sizes: 1 x 64 / 36 ms and 2 x 64 / 54 ms."""
        assert prior().calibration.ceiling_rps == pytest.approx(2 * 64 / 0.054)

    def test_documents_round_trip(self) -> None:
        """A stored calibration is the calibration."""
        calibration = prior().calibration
        assert Calibration.from_document(calibration.to_document()) == calibration
