"""When the batches of a sole prefill complete: a record, and what a model says about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from isochunk.makespan import FloatArray, Pipeline

MIN_INTERVAL_MS = 1e-9  # predicted intervals go through a logarithm


@dataclass(slots=True, eq=False)
class Run:
    """Sole-prefill batches from an empty pipeline on. Times are ms since its first step."""

    start_ms: float
    cached: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    """How many batches of the run had completed when this one was scheduled …"""
    lag_ms: list[float] = field(default_factory=list)
    """… and how long ago the last of them had, or the run had started."""
    done_ms: list[float] = field(default_factory=list)
    num_learnt: int = 0
    """Completions that were digested."""
    is_broken: bool = False
    """A completion came at an impossible time; those before it stay good."""

    def add(self, now_ms: float, num_cached: int, num_new: int) -> None:
        """A batch was scheduled."""
        self.cached.append(num_cached)
        self.new.append(num_new)
        self.after.append(len(self.done_ms))
        self.lag_ms.append(max(now_ms - self.start_ms - self.last_ms, 0.0))

    def complete(self, now_ms: float) -> None:
        """The oldest batch in flight has completed."""
        time_ms = now_ms - self.start_ms
        self.is_broken |= not (math.isfinite(time_ms) and time_ms > self.last_ms)
        if not self.is_broken:
            self.done_ms.append(time_ms)

    @property
    def last_ms(self) -> float:
        """The last completion, or the start."""
        return self.done_ms[-1] if self.done_ms else 0.0

    @property
    def intervals_ms(self) -> FloatArray:
        """Between the completions."""
        intervals: FloatArray = np.diff(self.done_ms, prepend=0.0)
        return intervals


class Predictor:
    """Intervals between a run's completions, for any factors on the models' coefficients.

    Args:
        pipeline: the models.
        run: with its completions.
        num_known: intervals at the beginning that are left out of the answers.
    """

    def __init__(self, pipeline: Pipeline, run: Run, num_known: int = 0) -> None:
        self._run, self._count, self._num_known = run, len(run.done_ms), num_known
        self._coefficients = pipeline.coefficients()
        self._cached, new = np.array(run.cached[: self._count]), np.array(run.new[: self._count])
        self._new = new
        self._parts = self._parts_of(1.0)
        transfers = pipeline.transfer_fixed_ms + pipeline.transfer_token_ms * new
        self._transfers = transfers[:, None] * np.arange(pipeline.num_stages)

    def intervals_ms(self, factors: FloatArray) -> FloatArray:
        """By (row of ``factors``, chunk), from the recurrence of :mod:`isochunk.makespan`.

        A batch is released as long after the completion before it as it really was.
        """
        times = np.einsum("vf,fkp->kvp", factors, self._parts)
        cums = np.cumsum(times, axis=2) + self._transfers[:, None]
        leads = times - cums
        free = np.zeros(times.shape[1:])
        done = np.zeros((self._count + 1, len(factors)))
        for k in range(self._count):
            release = done[self._run.after[k]] + self._run.lag_ms[k]
            np.maximum(free[:, 0], release, out=free[:, 0])
            np.maximum.accumulate(free + leads[k], axis=1, out=free)
            free += cums[k]
            done[k + 1] = free[:, -1]
        return self._usable(np.diff(done, axis=0).T)

    def full_pipeline_ms(self, factors: FloatArray) -> FloatArray:
        """The same for a full pipeline whose chunk times don't rise: the slowest stage's."""
        times = np.einsum("vf,fkp->vkp", factors, self._parts)
        intervals: FloatArray = times.max(axis=2)
        intervals[:, 0] = times[:, 0].sum(axis=1) + self._transfers[0, -1]
        return self._usable(intervals)

    def tilt(self, before: FloatArray, after: FloatArray) -> float:
        """How much other factors change chunk times against each other, as a logarithm.

        The run's chunks, and chunks of half and twice their size, on their slowest stage.
        """
        parts = np.concatenate([self._parts_of(scale) for scale in (0.5, 1.0, 2.0)], axis=1)
        times = np.einsum("vf,fkp->vkp", np.stack([before, after]), parts).max(axis=2)
        return float(np.ptp(np.log(times[1] / times[0])))

    def _parts_of(self, scale: float) -> FloatArray:
        """What each coefficient adds to the time of a chunk, by (factor, chunk, stage)."""
        cached, new = self._cached, self._new * scale
        features = np.stack([np.ones(len(new)), cached, new, new * (2.0 * cached + new)])
        parts: FloatArray = features[:, :, None] * self._coefficients[:, None, :]
        return parts

    def _usable(self, intervals: FloatArray) -> FloatArray:
        positive: FloatArray = np.maximum(intervals[:, self._num_known :], MIN_INTERVAL_MS)
        return positive
