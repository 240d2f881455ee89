"""What a step costs a stage besides its forward: scheduling, messages, staging, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from isochunk.fitting import ChunkSample
from isochunk.latency import LatencyModel
from isochunk.makespan import FloatArray

MIN_GAPS = 8
LOW_QUANTILE = 0.2
ROUGHLY = 0.25
"""Gaps that miss the prediction by more than this part of a typical overhead count ever less."""


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


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Successive chunks of a sole prefill, timed on every stage.

    Args:
        new: tokens, by chunk.
        latencies_ms: of the forwards, by (chunk, stage).
        gaps_ms: between the end of a stage's forward and the start of its next, by (chunk,
            stage); those of the first chunk are not used.
    """

    new: tuple[int, ...]
    latencies_ms: tuple[tuple[float, ...], ...]
    gaps_ms: tuple[tuple[float, ...], ...]

    def idle_and_overhead_ms(self, overhead: FloatArray, depth: int) -> FloatArray:
        """The gaps that an overhead (fixed, per token) explains, by (chunk but the first, stage).

        By the recurrence of :mod:`isochunk.makespan` with the timed forwards: a stage waits for
        the chunk, the first one also for the chunk ``depth`` before it to leave the pipeline.
        """
        ends = np.zeros(len(self.latencies_ms[0]))
        left: list[float] = []
        gaps = np.zeros((len(self.new), len(ends)))
        for k, (new, latencies) in enumerate(zip(self.new, self.latencies_ms, strict=True)):
            ready = left[k - depth] if k >= depth else 0.0
            for p, latency in enumerate(latencies):
                start = max(ready, ends[p]) + overhead[0] + overhead[1] * new
                gaps[k, p] = start - ends[p]
                ready = ends[p] = start + latency
            left.append(ready)
        return gaps[1:]


def timed_runs(stages: Sequence[Sequence[tuple[ChunkSample, float]]]) -> list[TimedRun]:
    """Prompt by prompt, from each stage's chunks with the gaps before them.

    Ends where a stage has lost a chunk's timing: what follows doesn't match any more.
    """
    runs: list[list[tuple[tuple[ChunkSample, float], ...]]] = []
    end = -1
    for chunk in zip(*stages, strict=False):
        shapes = {(sample.num_cached, sample.num_new) for sample, _ in chunk}
        if len(shapes) > 1:
            break
        ((num_cached, num_new),) = shapes
        if num_cached != end:
            runs.append([])
        runs[-1].append(chunk)
        end = num_cached + num_new
    return [
        TimedRun(
            new=tuple(chunk[0][0].num_new for chunk in run),
            latencies_ms=tuple(tuple(s.latency_ms for s, _ in chunk) for chunk in run),
            gaps_ms=tuple(tuple(gap for _, gap in chunk) for chunk in run),
        )
        for run in runs
    ]


def fit_step_overhead(runs: Sequence[TimedRun], depth: int) -> StepOverhead:
    """The overhead that, with the idle time it implies, explains the gaps of ``runs``.

    Robust (Cauchy) least squares from a low quantile of the gaps: a message that was late says
    nothing. Zero for fewer than 8 gaps.

    Args:
        runs: timed chunks.
        depth: batches in flight at most.
    """
    gaps = [np.array(run.gaps_ms[1:]).ravel() for run in runs]
    observed = np.concatenate([*gaps, np.zeros(0)])
    usable = np.isfinite(observed)
    if usable.sum() < MIN_GAPS:
        return StepOverhead()
    typical = max(float(np.quantile(observed[usable], LOW_QUANTILE)), 1e-6)
    scale = np.array([1.0, 1.0 / max(max(run.new) for run in runs)])

    def errors(values: FloatArray) -> FloatArray:
        explained = [run.idle_and_overhead_ms(values * scale, depth).ravel() for run in runs]
        missed: FloatArray = (np.concatenate(explained) - observed)[usable]
        return missed

    solved = least_squares(
        errors,
        [typical, 0.1 * typical],
        bounds=(0, np.inf),
        loss="cauchy",
        f_scale=ROUGHLY * typical,
        diff_step=1e-3,
    )
    fixed_ms, token_ms = (solved.x * scale).tolist()
    return StepOverhead(fixed_ms, token_ms)
