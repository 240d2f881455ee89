"""Makespan of a chunked prefill on a pipeline: the exact recurrence.

A prefill's chunks visit the stages in order and never overtake each other (a permutation
flow shop). With C(k, p) the time at which chunk k leaves stage p::

    C(k, p) = max(C(k, p−1) + transfer, C(k−1, p)) + t(k, p)
    C(k, −1) = C(k − D, P−1)            at most D batches are in flight

With equal stages and D unlimited this is the proportionate flow shop, whose makespan is
``Σ t_k + (P − 1)·max t_k``. With D = P it stays so whenever the times rise and then fall
(unimodal): a path over the in-flight edge (j, P−1) → (j+P, 0) replaces the P − 1 chunks
between by (P−1)·min(max before, max after), and none of those chunks is shorter than that.
Chunks 10, 1, 10 on two stages show that it may fail otherwise: 40 instead of 31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from isochunk.latency import LatencyModel

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a prefill runs on: one latency model per stage and what lies between them.

    Args:
        stages: one model per stage, first to last.
        transfer_fixed_ms: per batch and stage boundary [ms].
        transfer_token_ms: per token and stage boundary [ms].
        max_in_flight: batches that the engine keeps in flight; 0 means one per stage, which
            is what vLLM's batch queue holds.
        may_spare: the engine keeps one more while a policy wants it (see
            ``policies.wants_spare_batch``).
    """

    stages: tuple[LatencyModel, ...]
    transfer_fixed_ms: float = 0.0
    transfer_token_ms: float = 0.0
    max_in_flight: int = 0
    may_spare: bool = False

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty: a pipeline has at least one stage")
        if self.max_in_flight < 0:
            raise ValueError(f"max_in_flight={self.max_in_flight} must be >= 0")
        if self.transfer_fixed_ms < 0 or self.transfer_token_ms < 0:
            raise ValueError(
                f"transfer_fixed_ms={self.transfer_fixed_ms} and "
                f"transfer_token_ms={self.transfer_token_ms} must be >= 0"
            )

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.stages)

    @property
    def depth(self) -> int:
        """Batches in flight at most, without a spare one."""
        return self.max_in_flight or len(self.stages)

    def transfer_ms(self, num_tokens: float) -> float:
        """Time [ms] from a stage's end to the next stage's earliest start."""
        return self.transfer_fixed_ms + self.transfer_token_ms * num_tokens

    def scaled(self, c: float, gamma: float, b: float, a: float) -> Pipeline:
        """With all stages' coefficients times these factors."""
        stages = (
            LatencyModel(m.fixed_ms * c, m.prefix_ms * gamma, m.token_ms * b, m.attention_ms * a)
            for m in self.stages
        )
        return replace(self, stages=tuple(stages))

    def coefficients(self) -> FloatArray:
        """Rows c, γ, b, a; one column a stage."""
        return np.array(
            [[m.fixed_ms, m.prefix_ms, m.token_ms, m.attention_ms] for m in self.stages]
        ).T


def single_prefill_ms(pipeline: Pipeline, num_cached: int, ends: Sequence[int]) -> float:
    """Makespan [ms] of one prefill with chunk ``ends`` after ``num_cached`` cached tokens."""
    starts = np.array([[num_cached, *ends[:-1]]])
    return float(makespans_ms(pipeline, starts, np.array([ends]), np.array([len(ends)]))[0])


def stage_times_ms(pipeline: Pipeline, starts: IntArray, ends: IntArray) -> FloatArray:
    """``t`` of chunks start..end on every stage; one axis more than ``starts``."""
    fixed, prefix, token, attention = pipeline.coefficients()
    cached = starts[..., None].astype(float)
    new = (ends - starts)[..., None].astype(float)
    times: FloatArray = fixed + prefix * cached + new * (token + attention * (2 * cached + new))
    return times


def makespans_ms(
    pipeline: Pipeline, starts: IntArray, ends: IntArray, num_chunks: IntArray
) -> FloatArray:
    """Exact makespans [ms] of several plans at once.

    Args:
        pipeline: stages and transfers.
        starts: (plans, chunks) first token of each chunk, padded at the end.
        ends: (plans, chunks) one past the last token.
        num_chunks: chunks of each plan before the padding.
    """
    times = stage_times_ms(pipeline, starts, ends)
    transfers = pipeline.transfer_fixed_ms + pipeline.transfer_token_ms * (ends - starts)
    cums = np.cumsum(times, axis=2) + transfers[..., None] * np.arange(pipeline.num_stages)
    num_plans, longest = starts.shape
    # C(k, p) − cum(k, p) is the running maximum over q ≤ p of C(k−1, q) + t(k, q) − cum(k, q).
    leads = times - cums
    done = np.zeros((longest, num_plans))
    free = np.zeros((num_plans, pipeline.num_stages))
    depth = pipeline.depth
    for k in range(longest):
        if k >= depth:
            np.maximum(free[:, 0], done[k - depth], out=free[:, 0])
        np.maximum.accumulate(free + leads[:, k], axis=1, out=free)
        free += cums[:, k]
        done[k] = free[:, -1]
    result: FloatArray = done[num_chunks - 1, np.arange(num_plans)]
    return result
