"""The chunk plan of a sole prefill that minimises its predicted makespan.

Candidates are equal-time plans for every number of chunks near the closed-form optimum
``K* = sqrt((P−1)·S / (c + γ·(L₀+N)/2))`` with ``S = b·(N−L₀) + a·(N²−L₀²)``, and every fixed
size up to the budget; the exact flow-shop recurrence decides between them. So a plan is never
predicted slower than the best of those fixed sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from isochunk.makespan import (
    FloatArray,
    IntArray,
    Pipeline,
    makespans_ms,
    stage_times_ms,
)
from isochunk.stages import dominant_stages

FIXED_SIZES = tuple(1024 * 2**i for i in range(6))
"""Fixed chunk sizes [tokens] that a plan must not lose to, 1K…32K; the budget is added."""
MAX_CHUNKS = 1024
# How far from K* the search goes, as a factor: the makespan is flat around its minimum.
SEARCH_FACTOR = 1.7
MAX_CANDIDATES = 24
MIN_CANDIDATES = 6
# Chunks in all candidates together, about: bounds the planning time of very long prompts.
CHUNKS_TO_TRY = 2000
REFINE_ROUNDS = 8
# Chunk ends at each side of the plan that the refinement moves.
NUM_REFINED = 8
# Longer plans are close to the optimum anyway, and moving their ends takes memory K².
MAX_REFINED = 512


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunk ends of a prefill, in tokens from the prompt's start, and what they should cost."""

    num_cached: int
    ends: tuple[int, ...]
    makespan_ms: float
    target_ms: float
    """Time of the longest chunk on its slowest stage."""


@lru_cache(maxsize=64)
def plan_chunks(
    pipeline: Pipeline, num_cached: int, num_remaining: int, budget: int, alignment: int
) -> ChunkPlan:
    """Chunk ends that minimise the predicted makespan of a sole prefill; remembered.

    Args:
        pipeline: stages, transfers, batches in flight.
        num_cached: L₀ [tokens], e.g. a prefix-cache hit.
        num_remaining: tokens to compute, at least 1.
        budget: most tokens of a chunk.
        alignment: all ends but the last are multiples of it [tokens].
    """
    if num_remaining < 1 or budget < 1:
        raise ValueError(f"num_remaining={num_remaining} and budget={budget} must be >= 1")
    total = num_cached + num_remaining
    grid = _Grid(num_cached, total, budget, alignment)
    plans = _equal_time_plans(pipeline, grid)
    best, best_ms = _best(pipeline, num_cached, plans)
    fixed = [
        plan
        for size in sorted({*FIXED_SIZES, budget}, reverse=True)
        if size <= budget and (plan := grid.fixed(size, pipeline, best_ms)) is not None
    ]
    if fixed:
        fixed_best, fixed_ms = _best(pipeline, num_cached, fixed)
        if fixed_ms < best_ms:
            best, best_ms = fixed_best, fixed_ms
    best, best_ms = _refine(pipeline, grid, best, best_ms)
    starts, ends, _ = _pad([best], num_cached)
    target_ms = float(stage_times_ms(pipeline, starts, ends).max())
    return ChunkPlan(num_cached, best, best_ms, target_ms)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where chunk ends may lie."""

    num_cached: int
    total: int
    budget: int
    alignment: int

    def snap(self, wanted: npt.NDArray[np.floating[Any]]) -> tuple[int, ...] | None:
        """Nearest feasible ends to increasing real ones, ``total`` last; None: too few.

        No chunk is shorter than the alignment (the last: than half of it), unless the budget
        wants it.
        """
        step, ends, last = self.alignment, [], self.num_cached
        least = min(step, self.budget)
        for end in wanted:
            snapped = min(step * round(float(end) / step), self._furthest(last))
            fits = last + least <= snapped < self.total
            if fits and (snapped <= self.total - least // 2 or self.total - last > self.budget):
                ends.append(snapped)
                last = snapped
        if self.total - last > self.budget:
            return None
        return (*ends, self.total)

    def _furthest(self, start: int) -> int:
        """Last allowed end of a chunk from ``start``; unaligned only if nothing else fits."""
        end = start + self.budget
        return end - end % self.alignment if end - end % self.alignment > start else end

    def fixed(self, size: int, pipeline: Pipeline, best_ms: float) -> tuple[int, ...] | None:
        """Ends of fixed chunks, or None where the work alone takes ``best_ms`` or longer."""
        count = math.ceil((self.total - self.num_cached) / size)
        prefixes = count * self.num_cached + size * count * (count - 1) / 2
        new = self.total - self.num_cached
        area = new * (self.total + self.num_cached)
        work_ms = max(
            m.fixed_ms * count + m.prefix_ms * prefixes + m.token_ms * new + m.attention_ms * area
            for m in pipeline.stages
        )
        # Ends are aligned down, which may shorten prefixes by up to the alignment each.
        if work_ms * 0.98 >= best_ms or count > 4 * MAX_CHUNKS:
            return None
        return _Grid(self.num_cached, self.total, size, self.alignment).full()

    def full(self) -> tuple[int, ...]:
        """Ends of chunks as large as the budget and the alignment allow."""
        ends, last = [], self.num_cached
        while self.total - last > self.budget:
            last = self._furthest(last)
            ends.append(last)
        return (*ends, self.total)


def _pad(plans: list[tuple[int, ...]], num_cached: int) -> tuple[IntArray, IntArray, IntArray]:
    """``starts, ends, num_chunks`` arrays; padding chunks are empty."""
    longest = max(map(len, plans))
    ends = np.array([(*plan, *[plan[-1]] * (longest - len(plan))) for plan in plans])
    starts = np.concatenate([np.full((len(plans), 1), num_cached), ends[:, :-1]], axis=1)
    return starts, ends, np.array([len(plan) for plan in plans])


def _best(
    pipeline: Pipeline, num_cached: int, plans: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], float]:
    """The plan of least makespan; the one with fewest chunks among equals."""
    plans = sorted(set(plans), key=len)
    costs = makespans_ms(pipeline, *_pad(plans, num_cached))
    index = int(costs.argmin())
    return plans[index], float(costs[index])


def _equal_time_plans(pipeline: Pipeline, grid: _Grid) -> list[tuple[int, ...]]:
    """Plans whose chunks take the same time on their slowest stage, for K near K*."""
    least = math.ceil((grid.total - grid.num_cached) / grid.budget)
    if grid.total - grid.num_cached <= grid.alignment:
        return [grid.snap(np.array([])) or _even(grid, least)]
    fixed, prefix, token, attention = pipeline.coefficients()
    new, area = grid.total - grid.num_cached, grid.total**2 - grid.num_cached**2
    works = token * new + attention * area
    slowest = int(works.argmax())
    work = float(works[slowest])
    per_chunk = float(fixed[slowest] + prefix[slowest] * (grid.num_cached + grid.total) / 2)
    bubbles = float(works.sum() / works[slowest]) - 1.0 if work > 0 else 0.0
    most = min(max(math.ceil(new / grid.alignment), least), max(MAX_CHUNKS, least))
    ideal = min(math.sqrt(bubbles * work / per_chunk) if per_chunk > 0 else math.inf, float(most))
    low = min(max(int(ideal / SEARCH_FACTOR), least, 1), most)
    high = max(min(math.ceil(ideal * SEARCH_FACTOR) + 1, most), low)
    num_candidates = min(max(CHUNKS_TO_TRY // high, MIN_CANDIDATES), MAX_CANDIDATES)
    counts = np.unique(np.round(np.geomspace(low, high, num_candidates)).astype(int))
    targets = per_chunk + work / np.geomspace(low * 0.8, high * 1.2, num_candidates + 2)
    indices, curves, aligned = _equal_time_curves(pipeline, grid, targets, 2 * high + 2)
    plans = [_even(grid, least)]
    plans += [plan for row in aligned if (plan := grid.snap(row)) is not None]
    for count in counts:
        row = int(np.abs(indices - count).argmin())
        # Stretch the curve "tokens after k chunks" of the nearest target to `count` chunks.
        wanted = np.interp(
            np.arange(1, count) * (indices[row] / count), np.arange(curves.shape[1]), curves[row]
        )
        if (plan := grid.snap(wanted)) is not None:
            plans.append(plan)
    return plans


def _even(grid: _Grid, count: int) -> tuple[int, ...]:
    """``count`` chunks of about the same number of tokens, or full ones where that can't be."""
    step = (grid.total - grid.num_cached) / count
    plan = grid.snap(grid.num_cached + step * np.arange(1, count))
    return plan if plan is not None else grid.full()


def _equal_time_curves(
    pipeline: Pipeline, grid: _Grid, targets: FloatArray, max_chunks: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Ends of chunks that take each of the target times [ms].

    Returns:
        The (fractional) number of chunks that reaches the prompt's end, by target; the ends
        by (target, chunk) as real numbers; and the ends of chunks that take at most the
        target with every end aligned down: their sizes never grow, so they keep the stages
        in step where rounding to the nearest would alternate between two sizes.
    """
    num = len(targets)
    stages = dominant_stages(pipeline.stages)
    ends = np.full(2 * num, float(grid.num_cached))
    targets = np.concatenate([targets, targets])
    curve = [ends]
    while ends.min() < grid.total and len(curve) <= max_chunks:
        new = np.full(2 * num, float(grid.budget))
        for model in stages:
            # LatencyModel.solve_num_new, for all targets at once.
            free = np.maximum(targets - model.fixed_ms - model.prefix_ms * ends, 0.0)
            slope = model.token_ms + 2.0 * model.attention_ms * ends
            denominator = slope + np.sqrt(slope * slope + 4.0 * model.attention_ms * free)
            with np.errstate(divide="ignore", invalid="ignore"):
                np.fmin(new, 2.0 * free / denominator, out=new)
        new = np.maximum(new, 1.0)
        down = ends[num:] + new[num:]
        down -= down % grid.alignment
        ends = ends + new
        ends[num:] = np.maximum(down, curve[-1][num:] + grid.alignment)
        curve.append(ends)
    aligned = np.array(curve).T[num:]
    curves = np.array(curve).T[:num]
    reached = np.minimum((curves < grid.total).sum(axis=1), curves.shape[1] - 1)
    rows = np.arange(num)
    before, after = curves[rows, reached - 1], curves[rows, reached]
    indices = reached - 1 + (grid.total - before) / (after - before)
    return indices, curves, aligned[aligned[:, -1] >= grid.total]


def _refine(
    pipeline: Pipeline, grid: _Grid, plan: tuple[int, ...], cost_ms: float
) -> tuple[tuple[int, ...], float]:
    """Move single ends, all ends up to one, or all ends from one, while that helps.

    Equal times are optimal for equal stages up to the alignment; uneven stages and transfers
    gain from shorter chunks at one side.
    """
    is_even = len(set(pipeline.stages)) == 1 and pipeline.transfer_ms(1) == 0
    if not 2 <= len(plan) <= MAX_REFINED or (is_even and len(plan) > 2 * NUM_REFINED):
        return plan, cost_ms
    ends = np.array(plan)
    shifts = _shifts(len(ends))
    sizes = np.diff(ends, prepend=grid.num_cached)
    shortest = min(int(sizes.min()), grid.alignment)
    step = max(int(sizes.max()) // 4, grid.alignment)
    for _ in range(REFINE_ROUNDS):
        step = max(step - step % grid.alignment, grid.alignment)
        moved = ends + np.concatenate([shifts, -shifts]) * step
        sizes = np.diff(moved, axis=1, prepend=grid.num_cached)
        moved = moved[((sizes >= shortest) & (sizes <= grid.budget)).all(axis=1)]
        if len(moved):
            starts = np.concatenate(
                [np.full((len(moved), 1), grid.num_cached), moved[:, :-1]], axis=1
            )
            costs = makespans_ms(pipeline, starts, moved, np.full(len(moved), len(ends)))
            best = int(costs.argmin())
            if costs[best] < cost_ms * (1 - 1e-9):
                ends, cost_ms = moved[best], float(costs[best])
                continue
        if step == grid.alignment:
            break
        step //= 2
    return tuple(int(end) for end in ends), cost_ms


def _shifts(num_chunks: int) -> IntArray:
    """Which ends move together, one row a variant; the prompt's end never moves."""
    count = num_chunks - 1
    one = np.eye(count, dtype=np.int64)
    until = np.tril(np.ones((count, count), dtype=np.int64))
    chosen = sorted({*range(min(NUM_REFINED, count)), *range(max(count - NUM_REFINED, 0), count)})
    shifts = np.concatenate([one[chosen], until[chosen], until.T[chosen]])
    return np.concatenate([shifts, np.zeros((len(shifts), 1), dtype=np.int64)], axis=1)
