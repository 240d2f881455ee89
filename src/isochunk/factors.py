"""What is believed about how wrong the four coefficients are: a Gaussian over log factors.

It starts at the fit ± 30 %. Each prompt updates it by damped Gauss–Newton steps on the relative
errors of the observed intervals, with Huber weights. Earlier evidence fades, so that a direction
that the chunks don't excite falls back to the fit, and a machine that changes is followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from isochunk.makespan import FloatArray

PRIOR_SPREAD = 0.3
"""Standard deviation of each log factor before any evidence."""
MAX_FACTOR = 1.6
"""Factors stay in 1/MAX_FACTOR..MAX_FACTOR, whatever is observed."""
MEMORY = 0.8
"""Weight of the earlier evidence after one more prompt."""
NOISE, NOISE_COUNT = 0.03, 3.0
"""Relative noise of an interval before any evidence, and how many errors that is worth."""
MAX_RATIO = 3.0
"""An interval this many times longer or shorter than predicted is something else."""
HUBER = 1.5
# Completions have kinks in the factors, where the longest path changes: secants, first coarse
# ones, and several step lengths to choose from.
SECANTS = (0.1, 0.1, 0.05, 0.05, 0.02, 0.02)
STEP_LENGTHS = (1.0, 0.6, 0.3, 0.1)

Predict = Callable[[FloatArray], FloatArray]
"""Intervals [ms] by (row of factors, chunk)."""


def _prior() -> FloatArray:
    return np.eye(4) / PRIOR_SPREAD**2


@dataclass(frozen=True, slots=True, eq=False)
class FactorBelief:
    """Mean and precision of the log factors on c, γ, b and a; and how noisy intervals are."""

    log_factors: FloatArray = field(default_factory=lambda: np.zeros(4))
    precision: FloatArray = field(default_factory=_prior)
    noise_count: float = NOISE_COUNT
    noise_squares: float = NOISE_COUNT * NOISE**2

    def faded(self) -> FactorBelief:
        """Before the evidence of one more prompt."""
        precision = MEMORY * self.precision + (1 - MEMORY) * _prior()
        mean = np.linalg.solve(precision, MEMORY * self.precision @ self.log_factors)
        return FactorBelief(
            mean, precision, MEMORY * self.noise_count, MEMORY * self.noise_squares
        )

    def update(
        self, intervals_ms: FloatArray, predict: Predict, rough_predict: Predict
    ) -> FactorBelief:
        """With more intervals.

        Args:
            intervals_ms: observed.
            predict: what they should be.
            rough_predict: a smooth approximation, whose steps are tried, too.
        """
        observed = np.log(intervals_ms)
        best = self
        for size in SECANTS:
            mean = best.log_factors
            points = np.exp(mean + size * np.vstack([np.zeros(4), np.eye(4), -np.eye(4)]))
            usable, sigmas, candidates = None, None, [mean[None]]
            for function in (predict, rough_predict):
                logs = np.log(function(points))
                slopes, errors = (logs[1:5] - logs[5:]) / (2 * size), observed - logs[0]
                if usable is None or sigmas is None:
                    usable = np.abs(errors) < math.log(MAX_RATIO)
                    if not usable.any():
                        return self
                    # Where chunk times rise, their differences count, and so does their noise.
                    gains = np.maximum(np.abs(slopes).sum(axis=0), 1.0)
                    best = self._with_noise((errors / gains)[usable])
                    sigmas = best.noise * gains
                weights = usable * HUBER / np.maximum(np.abs(errors / sigmas), HUBER) / sigmas**2
                precision = self.precision + (slopes * weights) @ slopes.T
                if function is predict:
                    best = replace(best, precision=precision)
                pull = (slopes * weights) @ errors + self.precision @ (self.log_factors - mean)
                candidates.append(
                    mean + np.outer(STEP_LENGTHS, np.linalg.solve(precision, pull))
                )
            tries = np.clip(np.vstack(candidates), -math.log(MAX_FACTOR), math.log(MAX_FACTOR))
            scaled = usable * np.abs(observed - np.log(predict(np.exp(tries)))) / sigmas
            misfit = np.where(scaled < HUBER, 0.5 * scaled**2, HUBER * (scaled - 0.5 * HUBER))
            moved = tries - self.log_factors
            costs = misfit.sum(axis=1) + 0.5 * ((moved @ self.precision) * moved).sum(axis=1)
            best = replace(best, log_factors=tries[int(costs.argmin())])
        return best

    @property
    def noise(self) -> float:
        """Standard deviation of an interval's relative error."""
        return math.sqrt(self.noise_squares / self.noise_count)

    def _with_noise(self, errors: FloatArray) -> FactorBelief:
        spread = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
        return replace(
            self,
            noise_count=self.noise_count + len(errors),
            noise_squares=self.noise_squares + len(errors) * spread**2,
        )
