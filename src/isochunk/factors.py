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
POINTS = np.vstack([np.zeros(4), np.eye(4), -np.eye(4)])
CONVERGED = 1e-3

Predict = Callable[[FloatArray], FloatArray]
"""Intervals [ms] by (row of factors, chunk)."""


def _prior() -> FloatArray:
    precision: FloatArray = np.eye(4) / PRIOR_SPREAD**2
    return precision


@dataclass(frozen=True, slots=True, eq=False)
class FactorBelief:
    """Mean and precision of the log factors on c, γ, b and a; and how noisy intervals are."""

    log_factors: FloatArray = field(default_factory=lambda: np.zeros(4))
    precision: FloatArray = field(default_factory=_prior)
    noise_count: float = NOISE_COUNT
    noise_squares: float = NOISE_COUNT * NOISE**2

    def faded(self) -> FactorBelief:
        """Before the evidence of one more prompt."""
        precision: FloatArray = MEMORY * self.precision + (1 - MEMORY) * _prior()
        return FactorBelief(
            np.linalg.solve(precision, MEMORY * self.precision @ self.log_factors).astype(float),
            precision,
            MEMORY * self.noise_count,
            MEMORY * self.noise_squares,
        )

    def update(
        self, intervals_ms: FloatArray, predict: Predict, rough_predict: Predict
    ) -> FactorBelief:
        """With more intervals.

        Args:
            intervals_ms: observed, all > 0.
            predict: what they should be.
            rough_predict: a smooth approximation, whose steps are tried, too.
        """
        observed = np.log(intervals_ms)
        belief = self
        for size in SECANTS:
            mean = belief.log_factors
            errors, slopes = _linearise(observed, predict, mean, size)
            usable = np.abs(errors) < math.log(MAX_RATIO)
            if not usable.any():
                return self
            # Where chunk times rise, their differences count, and so does their noise.
            gains = np.maximum(np.abs(slopes).sum(axis=0), 1.0)
            belief = self._with_noise((errors / gains)[usable])
            sigmas = np.where(usable, belief.noise * gains, math.inf)
            step, precision = self._step(mean, errors, slopes, sigmas)
            rough_step, _ = self._step(
                mean, *_linearise(observed, rough_predict, mean, size), sigmas
            )
            tries = np.vstack([np.outer(STEP_LENGTHS, step), np.outer(STEP_LENGTHS, rough_step)])
            limit = math.log(MAX_FACTOR)
            tries = np.vstack([mean, np.clip(mean + tries, -limit, limit)])
            costs = self._costs(tries, (observed - np.log(predict(np.exp(tries)))) / sigmas)
            belief = replace(belief, log_factors=tries[int(costs.argmin())], precision=precision)
            if np.abs(belief.log_factors - mean).max() < CONVERGED:
                break
        return belief

    def _step(
        self, mean: FloatArray, errors: FloatArray, slopes: FloatArray, sigmas: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The Gauss–Newton step from ``mean``, and the precision there."""
        weights = HUBER / np.maximum(np.abs(errors / sigmas), HUBER) / sigmas**2
        precision = self.precision + (slopes * weights) @ slopes.T
        pull = (slopes * weights) @ errors + self.precision @ (self.log_factors - mean)
        return np.linalg.solve(precision, pull), precision

    def _costs(self, tries: FloatArray, scaled: FloatArray) -> FloatArray:
        """Negative log posterior of each row of ``tries``, up to a constant."""
        size = np.abs(scaled)
        misfits = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        moved = tries - self.log_factors
        costs: FloatArray = misfits.sum(axis=1) + 0.5 * ((moved @ self.precision) * moved).sum(
            axis=1
        )
        return costs

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


def _linearise(
    observed: FloatArray, predict: Predict, mean: FloatArray, size: float
) -> tuple[FloatArray, FloatArray]:
    """Relative errors at ``mean``, and the secants of width ``size`` by (factor, interval)."""
    logs = np.log(predict(np.exp(mean + size * POINTS)))
    return observed - logs[0], (logs[1:5] - logs[5:]) / (2 * size)
