"""How two policies compare round by round, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import quantile_test

CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Median ratio of two policies' times in the same round, and where the true one may lie.

    A machine that becomes slower or faster between rounds changes both times, so their ratio is
    steadier than either. The bounds are the sign test's: order statistics, right in at least 90 %
    of cases for independent rounds, whatever their noise. Fewer than 5 rounds bound nothing: None.
    ``others`` that were chosen as the best from the same rounds had luck: the ratio is then rather
    too high.
    """

    median: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> PairedRatio:
        """From times by round.

        Raises:
            ValueError: not the same number of rounds, or none.
        """
        if len(times) != len(others) or not times:
            raise ValueError(f"{len(times)} and {len(others)} rounds can't be paired")
        ratios = np.array(times) / np.array(others)
        interval = quantile_test(ratios).confidence_interval(CONFIDENCE)
        low, high = (None if math.isnan(bound) else float(bound) for bound in interval)
        return cls(float(np.median(ratios)), low, high)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3f}"
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"
