"""Fit the latency model to timed chunks, and say whether the fit can be trusted.

Single outliers are found with a robust fit and left out of the final one, by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from isochunk.latency import InvalidLatencyModelError, LatencyModel
from isochunk.least_squares import FloatArray, Problem, Solution, features

MAX_OUTLIER_FRACTION = 1 / 3


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One timed chunk on one stage: ``num_new`` tokens after ``num_cached``, in ms."""

    num_cached: int
    num_new: int
    latency_ms: float


class Refusal(StrEnum):
    """Why a fit isn't used."""

    TOO_FEW = "too few samples"
    NOT_IDENTIFIABLE = "attention term not identifiable"
    ILL_CONDITIONED = "samples too alike (ill-conditioned)"
    RESIDUAL = "model does not describe the samples"
    UNCERTAIN = "predictions too uncertain"
    NO_USEFUL_SHRINK = "no useful shrink"


@dataclass(frozen=True, slots=True)
class FitChecks:
    """What a fit must satisfy. Relative errors are fractions of the predicted time."""

    min_shapes: int = 6
    max_median_error: float = 0.07
    max_p90_error: float = 0.25
    max_condition_number: float = 1e4
    max_prediction_error: float = 0.10
    min_attention_significance: float = 3.0
    """The attention term must be this many of its standard errors above 0."""

    @classmethod
    def with_error(cls, max_median_error: float) -> FitChecks:
        """For a machine of more or less noise: error and uncertainty limits in proportion."""
        default = cls()
        scale = max_median_error / default.max_median_error
        return cls(
            max_median_error=max_median_error,
            max_p90_error=scale * default.max_p90_error,
            max_prediction_error=scale * default.max_prediction_error,
        )


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fit with its diagnostics: accepted, or refused for one reason.

    ``model`` is set whenever the equations could be solved, also for a refused fit, so that
    a report can show what was found; use it only if ``accepted``.
    """

    refusal: Refusal | None
    detail: str
    model: LatencyModel | None = None
    standard_errors: dict[str, float] = field(default_factory=dict)
    median_error: float = math.nan
    max_error: float = math.nan
    condition_number: float = math.nan
    prediction_error: float = math.nan
    num_samples: int = 0
    num_shapes: int = 0
    outliers: tuple[ChunkSample, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether every check passed."""
        return self.refusal is None

    def __str__(self) -> str:
        if not self.accepted:
            return f"{self.refusal}: {self.detail}"
        return (
            f"{self.model} [{self.num_samples} samples, {self.num_shapes} shapes, "
            f"{len(self.outliers)} outliers; error median {self.median_error:.1%}, "
            f"max {self.max_error:.1%}; prediction ±{self.prediction_error:.1%}]"
        )


def fit_latency_model(
    samples: Iterable[ChunkSample],
    sweep: Iterable[tuple[int, float]] = (),
    checks: FitChecks | None = None,
) -> FitReport:
    """Fit ``t(L, x) = c + γL + bx + a(2Lx + x²)`` with non-negative coefficients.

    Args:
        samples: timed chunks of real prefills on one stage.
        sweep: ``(num_tokens, latency_ms)`` of attention-free forwards. Their slope is a loose
            prior for ``b``; their fixed cost isn't used, so that the serving overhead is in
            ``c``.
        checks: acceptance thresholds.

    Returns:
        The accepted model with standard errors, or the reason why there is none.
    """
    checks = checks or FitChecks()
    samples = list(samples)
    usable = [s for s in samples if math.isfinite(s.latency_ms) and s.latency_ms > 0]
    report = FitReport(None, "", num_samples=len(samples), num_shapes=len(_by_shape(usable)))
    if report.num_shapes < checks.min_shapes:
        return replace(
            report,
            refusal=Refusal.TOO_FEW,
            detail=f"{report.num_shapes} different (cached, new) shapes, "
            f"{checks.min_shapes} needed",
        )
    if all(s.num_cached == 0 for s in usable):
        return replace(
            report,
            refusal=Refusal.NOT_IDENTIFIABLE,
            detail="no chunk with a cached prefix was timed",
        )
    token_ms = sweep_slope(sweep)
    fits = _problem([(s, 1) for s in usable], token_ms).inliers()
    kept = [s for s, is_inlier in zip(usable, fits, strict=True) if is_inlier]
    outliers = tuple(s for s in samples if s not in kept)
    report = replace(report, outliers=outliers)
    if len(outliers) > MAX_OUTLIER_FRACTION * len(samples):
        return replace(
            report,
            refusal=Refusal.RESIDUAL,
            detail=f"{len(outliers)} of {len(samples)} chunk times are outliers",
        )
    shapes = [
        (ChunkSample(num_cached, num_new, median(times)), len(times))
        for (num_cached, num_new), times in _by_shape(kept).items()
    ]
    solution = _problem(shapes, token_ms).solve()
    return _judge(solution, [shape for shape, _ in shapes], checks, report)


def sweep_slope(sweep: Iterable[tuple[int, float]]) -> float | None:
    """Cost per token [ms] of attention-free forwards ``(num_tokens, ms)``; None if unusable.

    A straight line through relative errors, robust to single outliers.
    """
    points = np.array([p for p in sweep if math.isfinite(p[1]) and p[1] > 0], dtype=np.float64)
    if len(points) < 2 or np.ptp(points[:, 0]) == 0:
        return None
    tokens, times = points[:, 0] / points[:, 0].max(), points[:, 1]

    def relative_errors(line: FloatArray) -> FloatArray:
        errors: FloatArray = (line[0] + line[1] * tokens) / times - 1.0
        return errors

    line = least_squares(
        relative_errors,
        np.full(2, float(np.median(times)) / 2),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=0.05,
        x_scale=float(np.median(times)),
    ).x
    slope = float(line[1] / points[:, 0].max())
    return slope if slope > 0 else None


def _problem(samples: Sequence[tuple[ChunkSample, int]], token_ms: float | None) -> Problem:
    """Of ``(sample, how many it stands for)``."""
    return Problem.build(
        cached=[s.num_cached for s, _ in samples],
        new=[s.num_new for s, _ in samples],
        times_ms=[s.latency_ms for s, _ in samples],
        counts=[count for _, count in samples],
        token_ms=token_ms,
    )


def _by_shape(samples: Sequence[ChunkSample]) -> dict[tuple[int, int], list[float]]:
    """(cached, new) -> latencies, in order of first appearance."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for s in samples:
        groups[(s.num_cached, s.num_new)].append(s.latency_ms)
    return groups


def _judge(
    solution: Solution,
    shapes: Sequence[ChunkSample],
    checks: FitChecks,
    report: FitReport,
) -> FitReport:
    """Add the diagnostics to ``report`` and run every acceptance check."""
    try:
        model = LatencyModel(*(float(v) for v in solution.coefficients))
    except InvalidLatencyModelError as error:
        return replace(report, refusal=Refusal.RESIDUAL, detail=str(error))
    errors = np.sqrt(np.diag(solution.covariance))
    cached = np.array([s.num_cached for s in shapes], dtype=np.float64)
    new = np.array([s.num_new for s in shapes], dtype=np.float64)
    times = np.array([s.latency_ms for s in shapes])
    relative = np.abs(times / (features(cached, new) @ solution.coefficients) - 1.0)
    # Where the policy will ask: the observed shapes and the corners of their range.
    asked = features(
        np.concatenate([cached, [cached.max(), cached.max()]]),
        np.concatenate([new, [new.max(), new.min()]]),
    )
    spread = np.sqrt(np.einsum("ij,jk,ik->i", asked, solution.covariance, asked))
    uncertainty = float((spread / (asked @ solution.coefficients)).max())
    median_error, p90_error = (float(np.quantile(relative, q)) for q in (0.5, 0.9))
    report = replace(
        report,
        model=model,
        standard_errors={f.name: float(e) for f, e in zip(fields(model), errors, strict=True)},
        median_error=median_error,
        max_error=float(relative.max()),
        condition_number=solution.condition_number,
        prediction_error=uncertainty,
    )
    if median_error > checks.max_median_error or p90_error > checks.max_p90_error:
        refusal = Refusal.RESIDUAL
        detail = (
            f"relative error median {median_error:.1%}, 90th percentile {p90_error:.1%}; "
            f"at most {checks.max_median_error:.0%} and {checks.max_p90_error:.0%} allowed"
        )
    elif model.attention_ms <= checks.min_attention_significance * errors[3]:
        refusal = Refusal.NOT_IDENTIFIABLE
        detail = f"a = {model.attention_ms:.3g} ± {errors[3]:.2g} ms/token² cannot be told from 0"
    elif solution.condition_number > checks.max_condition_number:
        refusal = Refusal.ILL_CONDITIONED
        detail = (
            f"condition number {solution.condition_number:.3g}, "
            f"at most {checks.max_condition_number:.0e} allowed"
        )
    elif uncertainty > checks.max_prediction_error:
        refusal = Refusal.UNCERTAIN
        detail = (
            f"standard error of a predicted chunk time up to {uncertainty:.1%}, "
            f"at most {checks.max_prediction_error:.0%} allowed"
        )
    else:
        return report
    return replace(report, refusal=refusal, detail=detail)
