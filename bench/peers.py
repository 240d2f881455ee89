"""Other systems' chunking as policies, and an oracle.

Formulas re-derived from public documentation:

- fixed: vLLM's chunked prefill, every chunk ``max_num_batched_tokens``.
- quadratic: SGLang ("dynamic chunking" of pipeline parallelism; smoothing 0.75) and vLLM-Ascend
  ("profiling chunk"; smoothing 1.0) fit f(l) = a·l² + b·l + const and solve
  f(L + x) − f(L) = f(x₀): equal latency with c = γ = 0.
- equal latency: ATOM's guide "Dynamic Chunked Pipeline Parallel" (ROCm documentation); smoothing
  0.75, minimum chunk 4096.
"""

from __future__ import annotations

import numpy as np

from isochunk.chunk_plan import FIXED_SIZES
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkPolicy, EqualLatency, FixedChunk

ALIGNMENT = 64
BUDGET = max(FIXED_SIZES)
ATOM_SMOOTHING, ATOM_MIN_CHUNK = 0.75, 4096
SGLANG_SMOOTHING, ASCEND_SMOOTHING = 0.75, 1.0
INITIAL_SIZES = (8192, 16384, 32768)
ORACLE_POINTS = 512
ORACLE_BOUNDS = 240


def fixed(size: int) -> ChunkPolicy:
    return FixedChunk(size)


def quadratic(pipeline: Pipeline, initial: int, smoothing: float) -> ChunkPolicy:
    model = pipeline.stages[0]
    return EqualLatency(
        LatencyModel(0.0, 0.0, model.token_ms, model.attention_ms),
        initial,
        smooth_factor=smoothing,
        min_chunk=ATOM_MIN_CHUNK,
        alignment=ALIGNMENT,
    )


def equal_latency(pipeline: Pipeline, initial: int) -> ChunkPolicy:
    return EqualLatency(
        pipeline.stages[0],
        initial,
        smooth_factor=ATOM_SMOOTHING,
        min_chunk=ATOM_MIN_CHUNK,
        alignment=ALIGNMENT,
    )


def oracle_ms(pipeline: Pipeline, num_tokens: int, budget: int = BUDGET) -> tuple[float, int]:
    """Least ``Σ t + (P−1)·max t`` over all aligned chunk sequences, for equal stages.

    Dynamic programming over chunk ends, once for each bound M on max t: the least Σ t with every
    t ≤ M, plus (P−1)·M. The bounds lie 1–2 % apart and each result is charged the *next smaller*
    one, so the value is a lower bound of the true optimum on its grid of ends. The limit of
    batches in flight is ignored, which can only lower it further.

    Returns:
        The makespan [ms], and the grid [tokens]: 64 where the prompt has at most 512 such ends.
    """
    grid = max(ALIGNMENT, num_tokens // ORACLE_POINTS)
    model = pipeline.stages[0]
    points = np.arange(0, num_tokens + 1, grid, dtype=float)
    starts, ends = points[:, None], points[None, :]
    new = ends - starts
    times = (
        model.fixed_ms
        + model.prefix_ms * starts
        + model.token_ms * new
        + model.attention_ms * new * (2 * starts + new)
    )
    times[(new <= 0) | (new > budget)] = np.inf
    shortest = max(float(times[i, i + 1]) for i in range(len(points) - 1))
    longest = float(times[np.isfinite(times)].max())
    bounds = np.geomspace(shortest, longest * 1.0000001, ORACLE_BOUNDS)
    best = np.full((len(points), ORACLE_BOUNDS), np.inf)
    best[0] = 0.0
    width = budget // grid
    for end in range(1, len(points)):
        low = max(0, end - width)
        time = times[low:end, end, None]
        best[end] = np.where(time <= bounds, best[low:end] + time, np.inf).min(axis=0)
    charged = np.concatenate([bounds[:1], bounds[:-1]])
    return float((best[-1] + (pipeline.num_stages - 1) * charged).min()), grid
