"""Ratios round by round: steadier than ratios of medians, with bounds that hold."""

import numpy as np
import pytest

from isochunk.benchmark.paired import PairedRatio


def test_a_drifting_machine_doesnt_change_the_ratio() -> None:
    speeds = [1.0, 1.4, 0.9, 2.0, 1.1]
    ratio = PairedRatio.of([0.9 * s for s in speeds], speeds)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    assert str(ratio) == "0.900 (0.900–0.900)"


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_few_rounds_bound_nothing(rounds: int) -> None:
    ratio = PairedRatio.of([1.0] * rounds, [2.0] * rounds)
    assert (ratio.low, ratio.median, ratio.high) == (None, 0.5, None)
    assert str(ratio) == "0.500"


@pytest.mark.parametrize("rounds", [5, 8, 15])
def test_the_bounds_hold_as_often_as_they_say(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    held = 0
    for _ in range(400):
        noise = rng.standard_t(2, rounds)  # outliers, too
        ratio = PairedRatio.of(list(0.97 * np.exp(0.02 * noise)), [1.0] * rounds)
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 0.97 <= ratio.high
    assert held >= 0.855 * 400  # 90 % less three standard errors


@pytest.mark.parametrize(("times", "others"), [([1.0], [1.0, 2.0]), ([], [])])
def test_refuses_what_cant_be_paired(times: list[float], others: list[float]) -> None:
    with pytest.raises(ValueError, match="can't be paired"):
        PairedRatio.of(times, others)
