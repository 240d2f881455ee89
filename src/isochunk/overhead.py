"""What a step costs a stage besides its forward: scheduling, messages, staging, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from isochunk.latency import LatencyModel

MIN_GAPS = 8
QUANTILE = 0.25


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """``fixed_ms + token_ms·x`` between the forwards of a stage, x tokens in the step."""

    fixed_ms: float = 0.0
    token_ms: float = 0.0

    def add_to(self, model: LatencyModel) -> LatencyModel:
        """The model of a whole step: forward and overhead."""
        return replace(
            model,
            fixed_ms=model.fixed_ms + self.fixed_ms,
            token_ms=model.token_ms + self.token_ms,
        )


def fit_step_overhead(gaps: Sequence[tuple[int, float]]) -> StepOverhead:
    """Overhead from ``(num_new, gap_ms)``: time between a forward's end and the next's start.

    A gap is overhead plus idle time, so the overhead is a low quantile of the gaps: linear
    quantile regression (Koenker and Bassett, 1978) with non-negative coefficients, as a linear
    programme. Zero for fewer than 8 gaps.
    """
    if len(gaps) < MIN_GAPS:
        return StepOverhead()
    tokens = np.array([float(x) for x, _ in gaps])
    times = np.array([ms for _, ms in gaps])
    n, scale = len(gaps), float(tokens.max())
    # gap = fixed + slope·x/scale + over − under; cost q·over + (1 − q)·under
    costs = np.concatenate([[0.0, 0.0], np.full(n, QUANTILE), np.full(n, 1 - QUANTILE)])
    equations = np.hstack([np.ones((n, 1)), (tokens / scale)[:, None], np.eye(n), -np.eye(n)])
    solved = linprog(costs, A_eq=equations, b_eq=times, bounds=(0, None), method="highs")
    if not solved.success:
        return StepOverhead()
    return StepOverhead(float(solved.x[0]), float(solved.x[1]) / scale)
