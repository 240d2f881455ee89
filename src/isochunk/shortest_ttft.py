"""The policy "auto": chunks for the shortest TTFT, with nothing to tune.

*A sole prefill* follows a plan of minimal predicted makespan (:mod:`isochunk.chunk_plan`),
made once per prompt: re-planning at every chunk would see ever less work left and shrink the
chunks as the prompt drains.

*Several prefills* fill each other's bubbles, so only the step time matters. The closed form on
the total remaining work S of the slowest stage gives the number of steps
``K* = sqrt((P−1)·S / c)`` and with it the step's target time

    T* = c + S / K* = c + sqrt(S·c / (P−1))         c: what a step costs besides its tokens

Each step is packed first come, first served up to T* of predicted time, and never longer than
the step that fixed chunking would make of the same prompts.

*Starvation bound.* A prompt with less than the fraction σ = SHORT_SHARE of the head's remaining
work is *short*; short prompts get up to σ of each step, first come, first served. So

- a short prompt with work w behind short prompts with work A is prefilled within
  ``ceil((A + w) / (σ·(T* − c))) + 1`` steps, however long the head is (one alignment unit a step
  at least);
- any other prompt waits at most 1/(1−σ) times as long as first come, first served would make it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from isochunk.chunk_plan import ChunkPlan, plan_chunks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkDecision, ChunkReason, Prefill, Step

SHORT_SHARE = 0.5
"""σ: what short prompts may take of a step, and what makes a prompt short."""
MAX_SHORTS = 64
# A chunk off the plan (the engine scheduled less than asked) may take this much longer than
# the plan's longest to get back on it.
OFF_PLAN_TOLERANCE = 1.05


class ShortestTTFT:
    """Plans a sole prefill, packs several by time.

    Args:
        pipeline: fitted stages, transfers between them, batches in flight.
        max_num_batched_tokens: the engine's token budget of a step.
        alignment: chunk ends are multiples of this [tokens], a prompt's last one aside.
    """

    def __init__(self, pipeline: Pipeline, max_num_batched_tokens: int, alignment: int) -> None:
        if max_num_batched_tokens < 1 or alignment < 1:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} and "
                f"alignment={alignment} must be >= 1"
            )
        self.pipeline = pipeline
        self.budget = max_num_batched_tokens
        self.alignment = alignment
        self.plan: ChunkPlan | None = None
        """The sole prefill's plan; None while there are several."""
        self._plan_key: tuple[str, int, int] = ("", 0, 0)
        self._packer = StepPacker(pipeline, max_num_batched_tokens, alignment)
        self._is_sole = True

    @property
    def target_ms(self) -> float:
        """Target time of a step on its slowest stage."""
        return self.plan.target_ms if self.plan is not None else self._packer.target_ms

    def begin_step(self, step: Step) -> None:
        """Plan the step if it has several prefills."""
        self._is_sole = len(step.prefills) < 2
        if not self._is_sole:
            self.plan = None
            self._packer.begin_step(step)

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """The plan's next chunk, or this prefill's share of the step."""
        if num_allowed < 1 or prefill.num_remaining < 1:
            return ChunkDecision(max(num_allowed, 0), ChunkReason.UNREACHABLE)
        if not self._is_sole:
            return ChunkDecision(self._packer.size(prefill, num_allowed), ChunkReason.MODEL)
        plan = self._plan_for(prefill, num_allowed)
        if plan is None:
            return ChunkDecision(num_allowed, ChunkReason.UNREACHABLE)
        return ChunkDecision(self._next_chunk(plan, prefill, num_allowed), ChunkReason.MODEL)

    def _plan_for(self, prefill: Prefill, num_allowed: int) -> ChunkPlan | None:
        """The cached plan, or a new one: other prompt, preempted, or less budget than planned."""
        plan, (request_id, total, budget) = self.plan, self._plan_key
        cached = prefill.num_cached
        is_same = (
            plan is not None
            and request_id == prefill.request_id
            and total == cached + prefill.num_remaining
            and self._last_cached <= cached
        )
        if not is_same:
            budget = self.budget
        if num_allowed < min(budget, prefill.num_remaining) and (
            not is_same or plan is None or self._planned_end(plan, cached) - cached > num_allowed
        ):
            # Decode tokens take a part of the budget; keep the smaller one for this prompt.
            budget, is_same = max(num_allowed - num_allowed % self.alignment, 1), False
        self._last_cached = cached
        if is_same:
            return plan
        planned = plan_chunks(self.pipeline, cached, prefill.num_remaining, budget, self.alignment)
        if not math.isfinite(planned.makespan_ms):
            self.plan = None
            return None
        self.plan = planned
        self._plan_key = (prefill.request_id, cached + prefill.num_remaining, budget)
        return planned

    _last_cached = 0

    @staticmethod
    def _planned_end(plan: ChunkPlan, cached: int) -> int:
        return plan.ends[min(bisect_right(plan.ends, cached), len(plan.ends) - 1)]

    def _next_chunk(self, plan: ChunkPlan, prefill: Prefill, num_allowed: int) -> int:
        cached = prefill.num_cached
        index = bisect_right(plan.ends, cached)
        start = plan.ends[index - 1] if index else plan.num_cached
        end = plan.ends[min(index, len(plan.ends) - 1)]
        if start != cached:  # off the plan: merge a rest into the next chunk where that is quick
            for later in plan.ends[index + 1 :]:
                time_ms = _slowest_ms(self.pipeline.stages, cached, later - cached)
                if time_ms > plan.target_ms * OFF_PLAN_TOLERANCE or later - cached > num_allowed:
                    break
                end = later
        if end - cached <= num_allowed:
            return end - cached
        down = (cached + num_allowed) // self.alignment * self.alignment - cached
        return down if down > 0 else num_allowed


class StepPacker:
    """Packs the prefills of a step up to a target time; state is per step and per prompt set."""

    def __init__(self, pipeline: Pipeline, budget: int, alignment: int) -> None:
        self.pipeline, self.budget, self.alignment = pipeline, budget, alignment
        self.target_ms = 0.0
        times = [m.predict_ms(0, budget) for m in pipeline.stages]
        self._slowest = pipeline.stages[times.index(max(times))]
        # P − 1 for equal stages: how many of the slowest stage's steps fill and drain take.
        self._bubbles = sum(times) / max(times) - 1.0
        self._ids: list[str] = []
        # request id -> (cached tokens, work), as last seen
        self._works: dict[str, tuple[int, float, float]] = {}
        self._asked: set[str] = set()
        self._short_at: list[int] = []
        self._shorts: set[str] = set()
        self._admit: dict[str, int] = {}
        self._limit_ms = 0.0
        self._reserved_ms = 0.0
        self._base = 0.0
        # request id -> (tokens, time on each stage without c), of this step
        self._packed: dict[str, list[float]] = {}
        self._used = [0.0] * pipeline.num_stages

    # -- once per step ---------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Target, reserve for short prompts, and limit of this step."""
        prefills = step.prefills
        ids = [prefill.request_id for prefill in prefills]
        if ids != self._ids:
            self._ids = ids
            self._plan_set(prefills, step.num_running)
        self._packed.clear()
        decodes = step.num_decode_tokens
        self._used = [m.token_ms * decodes for m in self.pipeline.stages]
        self._limit_ms = min(self.target_ms, self._fixed_ms(prefills, decodes))
        self._reserved_ms = self._reserve_ms(prefills)

    def _plan_set(self, prefills: Sequence[Prefill], num_running: int | None) -> None:
        """The prompt set has changed: target time, short prompts, prompts to admit."""
        known, seen = self._works, self._works.get
        works: dict[str, tuple[int, float, float]] = {}
        total = depth = 0.0
        for prefill in prefills:
            entry = seen(prefill.request_id)
            if entry is None or entry[0] != prefill.num_cached:
                entry = self._work(prefill)
            works[prefill.request_id] = entry
            total += entry[1]
            depth += entry[2]
        del known
        self._works = works
        model = self._slowest
        step_ms = model.fixed_ms + model.prefix_ms * (depth / total if total > 0 else 0.0)
        self.target_ms = step_ms + (
            math.sqrt(total * step_ms / self._bubbles) if self._bubbles > 0 else total
        )
        head = works[prefills[0].request_id][1] * SHORT_SHARE
        self._short_at = [
            index for index, entry in enumerate(works.values()) if index and entry[1] < head
        ][:MAX_SHORTS]
        self._shorts = {prefills[index].request_id for index in self._short_at}
        running = len(prefills) if num_running is None else num_running
        last = self._short_at[-1] if self._short_at else 0
        self._admit = {
            prefill.request_id: prefill.num_cached
            for prefill in prefills[running:last]
            if prefill.request_id not in self._shorts
        }

    def _work(self, prefill: Prefill) -> tuple[int, float, float]:
        """Cached tokens, work [ms] besides the per-step cost, and work × mean prefix."""
        cached, new = prefill.num_cached, prefill.num_remaining
        model = self._slowest
        work = new * (model.token_ms + model.attention_ms * (2 * cached + new))
        return cached, work, work * (cached + new / 2)

    def _fixed_ms(self, prefills: Sequence[Prefill], decodes: int) -> float:
        """Time of the step that fixed chunking would make; stops where T* is exceeded."""
        left = self.budget - decodes
        worst = 0.0
        used = list(self._used)
        for prefill in prefills:
            if left <= 0 or worst >= self.target_ms:
                break
            new = min(prefill.num_remaining, left)
            left -= new
            for stage, model in enumerate(self.pipeline.stages):
                used[stage] += model.predict_ms(prefill.num_cached, new) - model.fixed_ms
                worst = max(worst, used[stage] + model.fixed_ms)
        return worst

    def _reserve_ms(self, prefills: Sequence[Prefill]) -> float:
        """Time kept for short prompts in this step."""
        model = self._slowest
        most = SHORT_SHARE * max(self._limit_ms - model.fixed_ms, 0.0)
        needed = 0.0
        for index in self._short_at:
            prefill = prefills[index]
            needed += model.predict_ms(prefill.num_cached, prefill.num_remaining)
            needed -= model.fixed_ms
            if needed >= most:
                return most
        return needed

    # -- once per prefill ------------------------------------------------------------------

    def size(self, prefill: Prefill, num_allowed: int) -> int:
        """Tokens for this prefill; 0 where the step is full."""
        cached, remaining = prefill.num_cached, prefill.num_remaining
        if (again := self._packed.pop(prefill.request_id, None)) is not None:
            self._used = [x - y for x, y in zip(self._used, again, strict=True)]
        is_first = not self._packed
        is_short = prefill.request_id in self._shorts and not is_first
        limit_ms = self._limit_ms if is_short else self._limit_ms - self._reserved_ms
        new = num_allowed
        for model, used in zip(self.pipeline.stages, self._used, strict=True):
            if not new:
                break
            solved = model.solve_num_new(limit_ms - used, cached)
            if solved < new:
                # The inverse is exact up to rounding: don't lose a token to it.
                new = int(solved + 1e-6)
        if new < remaining:
            new = max((cached + new) // self.alignment * self.alignment - cached, 0)
        if new == 0 and (is_first or self._admit.get(prefill.request_id) == cached):
            new = min(self.alignment - cached % self.alignment, num_allowed)
        if new > 0:
            times = [m.predict_ms(cached, new) - m.fixed_ms for m in self.pipeline.stages]
            self._packed[prefill.request_id] = times
            self._used = [x + y for x, y in zip(self._used, times, strict=True)]
        return new


def _slowest_ms(stages: Sequence[LatencyModel], num_cached: int, num_new: int) -> float:
    return max(model.predict_ms(num_cached, num_new) for model in stages)
