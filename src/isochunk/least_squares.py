"""Least squares of chunk times: non-negative, weighted, on *relative* residuals.

Chunk times span two orders of magnitude and their noise is proportional to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, lsq_linear
from scipy.stats import t as student_t

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# A sample is an outlier beyond this many robust standard deviations (MAD), and never
# for less than this relative error: a nearly perfect fit has no outliers.
OUTLIER_SIGMAS = 4.5
OUTLIER_FLOOR = 0.08
# The sweep runs without attention, so its cost per token is only near the real one: a prior
# on b of this relative width, at this assumed relative noise of a timed chunk.
SWEEP_SPREAD = 0.5
ASSUMED_NOISE = 0.03
ONE_SIGMA = 0.8413447  # P(Z <= 1)
# Few samples can agree by luck; no timing is steadier than this (relative).
NOISE_FLOOR = 0.01


def features(num_cached: FloatArray, num_new: FloatArray) -> FloatArray:
    """Design matrix, shape (n, 4): the factors of c, γ, b and a."""
    ones = np.ones_like(num_cached)
    area = num_new * (2.0 * num_cached + num_new)
    return np.column_stack([ones, num_cached, num_new, area])


@dataclass(frozen=True)
class Solution:
    """Coefficients with their covariance, and how well-conditioned the equations were."""

    coefficients: FloatArray  # c, γ, b, a
    covariance: FloatArray  # (4, 4); rows and columns of coefficients at their bound are 0
    condition_number: float


@dataclass(frozen=True)
class Problem:
    """One row per sample, and possibly a last one for the prior. Columns: c, γ, b, a."""

    design: FloatArray  # (rows, 4), columns scaled to a maximum of 1
    scale: FloatArray  # (4,)
    times_ms: FloatArray  # (rows,)
    weights: FloatArray  # (rows,) relative to a single timed sample
    num_samples: int

    @classmethod
    def build(
        cls,
        *,
        cached: Sequence[int],
        new: Sequence[int],
        times_ms: Sequence[float],
        counts: Sequence[int],
        token_ms: float | None,
    ) -> Problem:
        """From timed chunks.

        Args:
            cached: L of each chunk [tokens].
            new: its x [tokens].
            times_ms: its time.
            counts: how many timings it stands for.
            token_ms: a prior for b, or None.
        """
        num_samples = len(times_ms)
        design = features(np.array(cached, dtype=np.float64), np.array(new, dtype=np.float64))
        times, weights = list(times_ms), [math.sqrt(count) for count in counts]
        if token_ms is not None:  # as if b alone had been timed over so many tokens
            most = float(max(new))
            design = np.vstack([design, [0.0, 0.0, most, 0.0]])
            times.append(token_ms * most)
            weights.append(ASSUMED_NOISE / SWEEP_SPREAD)
        scale = design.max(axis=0)
        scale[scale == 0] = 1.0
        return cls(design / scale, scale, np.array(times), np.array(weights), num_samples)

    def inliers(self) -> BoolArray:
        """Which samples a robust fit explains, shape (samples,)."""
        start = lsq_linear(
            self.design * (self.weights / self.times_ms)[:, None], self.weights, bounds=(0, np.inf)
        ).x

        def relative_errors(coefficients: FloatArray) -> FloatArray:
            # log keeps over- and underestimates symmetric, and one 30x sample bounded.
            predicted = np.maximum(self.design @ coefficients, 1e-12)
            errors: FloatArray = self.weights * np.log(self.times_ms / predicted)
            return errors

        robust = least_squares(
            relative_errors,
            np.maximum(start, 1e-9 * self.times_ms.max()),
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=0.05,
        ).x
        errors = relative_errors(robust)[: self.num_samples]
        centred = np.abs(errors - np.median(errors))
        limit = max(OUTLIER_SIGMAS * 1.4826 * float(np.median(centred)), OUTLIER_FLOOR)
        explained: BoolArray = centred <= limit
        return explained

    def solve(self) -> Solution:
        """Weighted non-negative least squares, with its covariance."""
        design, times, weights = self.design, self.times_ms, self.weights
        predicted = times
        coefficients = np.zeros(4)
        for _ in range(3):  # weights follow the prediction, not the noisy measurement
            row_weights = weights / np.maximum(predicted, 1e-9)
            weighted = design * row_weights[:, None]
            coefficients = lsq_linear(weighted, times * row_weights, bounds=(0, np.inf)).x
            predicted = design @ coefficients
            # The prior's width is relative to itself: at b = 0 it would be infinitely sharp.
            predicted[self.num_samples :] = times[self.num_samples :]
        free = coefficients > 1e-6 * predicted.max()
        # The noise is that of the timed chunks; the prior says nothing about it.
        residuals = ((times - predicted) * row_weights)[: self.num_samples]
        degrees = max(self.num_samples - int(free.sum()), 1)
        # Few degrees of freedom: widen by Student's t, as a one-sigma interval of it would be.
        variance = max(float(residuals @ residuals) / degrees, NOISE_FLOOR**2)
        variance *= float(student_t.ppf(ONE_SIGMA, degrees)) ** 2
        active = weighted[:, free]
        norms = np.maximum(np.linalg.norm(active, axis=0), 1e-300)
        condition = float(np.linalg.cond(active / norms)) if free.any() else math.inf
        covariance = np.zeros((4, 4))
        if free.any():
            covariance[np.ix_(free, free)] = variance * np.linalg.pinv(active.T @ active)
        return Solution(
            np.where(free, coefficients, 0.0) / self.scale,
            covariance / np.outer(self.scale, self.scale),
            condition,
        )
