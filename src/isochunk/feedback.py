"""Corrects the latency models by when batches complete, as the engine itself sees it.

No worker is asked and no forward timed: the scheduler knows what it put into a batch, when, and
when that batch's output came back. A *run* is a sequence of sole-prefill batches that starts on
an empty pipeline; the flow-shop recurrence of :mod:`isochunk.makespan` predicts when each of
them completes. In a full pipeline of equal stages the intervals are ``t_k``, where chunk times
rise ``t_k + (P−1)·(t_k − t_{k−1})``.

What is learnt are four factors, on c, γ, b and a, the same for all stages (completions can't
tell stages apart). Each prompt's intervals update a Gaussian over their logarithms (Gauss–Newton
on relative errors, Huber weights), which starts at the fitted model ± 30 % and slowly forgets, so
that a direction without evidence falls back to the fit. Identifiable is what the chunks excite:
the scale at once, the tilt along the prompt (a and γ against b) after one prompt of some chunks,
c against b only from chunks of different sizes: of one prompt where attention makes
them shrink, of prompts of different length, or of a corrected plan.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from isochunk.latency import LatencyModel
from isochunk.makespan import FloatArray, Pipeline

PRIOR_SPREAD = 0.3
"""Standard deviation of the logarithm of each factor before any evidence."""
MAX_FACTOR = 1.6
"""Factors stay in 1/MAX_FACTOR..MAX_FACTOR, whatever is observed."""
DEAD_BAND = 0.01
"""Corrections all smaller than this are none: the fit as it is."""
MEMORY = 0.8
"""Weight of the earlier evidence after one more prompt."""
NOISE, NOISE_COUNT = 0.03, 3.0
"""Relative noise of an interval before any evidence, and how many residuals that is worth."""
MAX_RATIO = 3.0
"""An interval this many times longer or shorter than predicted is something else."""
HUBER = 1.5
MAX_CHUNKS = 512
STEPS = (0.1, 0.1, 0.05, 0.05, 0.02, 0.02)
FRACTIONS = (1.0, 0.6, 0.3, 0.1, 0.0)


@dataclass(slots=True)
class _Run:
    """Sole-prefill batches from an empty pipeline on. Times are ms since its first step."""

    start_ms: float
    cached: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    """How many batches of the run had completed when this one was scheduled …"""
    lag_ms: list[float] = field(default_factory=list)
    """… and how long before (or, if none had, the time since the run's start)."""
    done_ms: list[float] = field(default_factory=list)
    num_learnt: int = 0
    is_broken: bool = False


def _huber(scaled: FloatArray) -> FloatArray:
    size = np.abs(scaled)
    costs: FloatArray = np.where(size < HUBER, 0.5 * size * size, HUBER * (size - 0.5 * HUBER))
    return costs


def _huber_weights(scaled: FloatArray) -> FloatArray:
    weights: FloatArray = HUBER / np.maximum(np.abs(scaled), HUBER)
    return weights


@dataclass(frozen=True, slots=True)
class _Noise:
    """Spread of relative errors, from so many of them."""

    count: float
    squares: float

    @property
    def spread(self) -> float:
        return math.sqrt(self.squares / self.count)

    def with_more(self, count: int, spread: float) -> _Noise:
        """The old ones fade."""
        return _Noise(
            MEMORY * self.count + count, MEMORY * self.squares + count * spread * spread
        )


class CompletionFeedback:
    """Learns factors on the models' coefficients from batch completions.

    The engine calls ``scheduled`` and ``completed`` for every batch that has tokens, in order;
    both only take notes. ``learn`` digests them, in about 10 µs a chunk and iteration.

    Args:
        pipeline: as fitted.
        num_in_flight: batches under way that were scheduled before this object was made.
    """

    def __init__(self, pipeline: Pipeline, num_in_flight: int = 0) -> None:
        self.fitted = pipeline
        self.pipeline = pipeline
        """As corrected by what was learnt so far."""
        self._coefficients = pipeline.coefficients()
        self._log_factors = np.zeros(4)
        self._precision = np.eye(4) / PRIOR_SPREAD**2
        self._noise = _Noise(NOISE_COUNT, NOISE_COUNT * NOISE**2)
        self._in_flight: deque[_Run | None] = deque([None] * num_in_flight)
        self._run: _Run | None = None
        self._to_learn: list[_Run] = []

    @property
    def factors(self) -> tuple[float, ...]:
        """On c, γ, b and a."""
        return tuple(float(factor) for factor in np.exp(self._log_factors))

    def scheduled(self, now_ms: float, chunk: tuple[int, int] | None) -> None:
        """A batch went out: its only chunk as (cached, new) tokens, or None for anything else."""
        run = self._run
        if chunk is None or (run is not None and (run.is_broken or len(run.new) >= MAX_CHUNKS)):
            run = None
        elif not self._in_flight:
            run = _Run(now_ms)
            self._to_learn.append(run)
        if run is not None and chunk is not None:
            run.cached.append(chunk[0])
            run.new.append(chunk[1])
            run.after.append(len(run.done_ms))
            before_ms = run.done_ms[-1] if run.done_ms else 0.0
            run.lag_ms.append(max(now_ms - run.start_ms - before_ms, 0.0))
        self._run = run
        self._in_flight.append(run)

    def completed(self, now_ms: float) -> None:
        """The oldest batch in flight is back from the last stage."""
        run = self._in_flight.popleft() if self._in_flight else None
        if run is None or run.is_broken:
            return
        time_ms = now_ms - run.start_ms
        if not (math.isfinite(time_ms) and time_ms > (run.done_ms[-1] if run.done_ms else 0.0)):
            run.is_broken = True  # a clock that stands or jumps
            return
        run.done_ms.append(time_ms)

    def learn(self) -> None:
        """Update ``pipeline`` by all completions that came since."""
        runs = [run for run in self._to_learn if len(run.done_ms) > run.num_learnt]
        self._to_learn = [run for run in self._to_learn if run is self._run]
        for run in runs:
            self._learn(run)
        if runs:
            self.pipeline = self._corrected()

    def _learn(self, run: _Run) -> None:
        count, known = len(run.done_ms), run.num_learnt
        memory = 1.0 if known else MEMORY
        run.num_learnt = count
        prior = memory * self._precision + (1 - memory) * np.eye(4) / PRIOR_SPREAD**2
        mean = np.linalg.solve(prior, memory * self._precision @ self._log_factors)
        observed = np.log(np.diff(run.done_ms[:count], prepend=0.0))[known:]
        limit = math.log(MAX_FACTOR)
        current, precision, noise = mean, prior, self._noise
        for size in STEPS:
            steps = np.vstack([np.zeros(4), size * np.eye(4), -size * np.eye(4)])
            logs = np.log(self._intervals_ms(run, count, np.exp(current + steps))[:, known:])
            slopes = (logs[1:5] - logs[5:]) / (2 * size)
            errors = observed - logs[0]
            usable = np.isfinite(errors) & (np.abs(errors) < math.log(MAX_RATIO))
            if not usable.any():
                return
            # Where chunk times rise, intervals depend on differences of them, noise and all.
            gains = np.maximum(np.abs(slopes).sum(axis=0), 1.0)
            scaled = (errors / gains)[usable]
            spread = 1.4826 * float(np.median(np.abs(scaled - np.median(scaled))))
            noise = self._noise.with_more(len(scaled), spread)
            sigmas = noise.spread * gains
            weights = usable * _huber_weights(errors / sigmas) / sigmas**2
            precision = prior + (slopes * weights) @ slopes.T
            pull = (slopes * weights) @ errors + prior @ (mean - current)
            step = np.linalg.solve(precision, pull)
            tries = np.clip(current + np.outer(FRACTIONS, step), -limit, limit)
            logs = np.log(self._intervals_ms(run, count, np.exp(tries))[:, known:])
            costs = (usable * _huber((observed - logs) / sigmas)).sum(axis=1) + 0.5 * np.einsum(
                "vi,ij,vj->v", tries - mean, prior, tries - mean
            )
            current = tries[int(costs.argmin())]
        if np.isfinite(current).all():
            self._log_factors, self._precision, self._noise = current, precision, noise

    def _intervals_ms(self, run: _Run, count: int, factors: FloatArray) -> FloatArray:
        """Between the run's first ``count`` completions, by (row of ``factors``, chunk)."""
        cached, new = np.array(run.cached[:count]), np.array(run.new[:count])
        features = np.stack([np.ones(count), cached, new, new * (2.0 * cached + new)])
        times = np.einsum("vf,fp,fk->vkp", factors, self._coefficients, features)
        transfers = self.fitted.transfer_fixed_ms + self.fitted.transfer_token_ms * new
        cums = np.cumsum(times, axis=2) + transfers[:, None] * np.arange(times.shape[2])
        leads = times - cums
        free = np.zeros((len(factors), times.shape[2]))
        done = np.zeros((count + 1, len(factors)))
        for k in range(count):
            release = done[run.after[k]] + run.lag_ms[k]
            np.maximum(free[:, 0], release, out=free[:, 0])
            np.maximum.accumulate(free + leads[:, k], axis=1, out=free)
            free += cums[:, k]
            done[k + 1] = free[:, -1]
        intervals: FloatArray = np.maximum(np.diff(done, axis=0).T, 1e-9)
        return intervals

    def _corrected(self) -> Pipeline:
        if np.abs(self._log_factors).max() < DEAD_BAND:
            return self.fitted
        c, g, b, a = self.factors
        return replace(
            self.fitted,
            stages=tuple(
                LatencyModel(m.fixed_ms * c, m.prefix_ms * g, m.token_ms * b, m.attention_ms * a)
                for m in self.fitted.stages
            ),
        )
