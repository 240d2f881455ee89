"""The policy "auto": chunks for the shortest TTFT, with nothing to tune.

*A sole prefill* follows a plan of minimal predicted makespan (:mod:`isochunk.chunk_plan`),
made once per prompt: re-planning at every chunk would see ever less work left and shrink the
chunks as the prompt drains.

What earlier prompts have shown about the models (:mod:`isochunk.feedback`) goes into the next
plan. Most of it is digested in steps that have nothing to size, while the last chunks run: at the
start of a prompt it delays the first chunk.

*Several prefills* fill each other's bubbles, so only the step time matters
(:mod:`isochunk.step_target`): the steps are packed to a target time (:mod:`isochunk.step_packing`,
which also states the starvation bound). So are the first steps of a prompt that follows others
whose last chunks are still in flight.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from isochunk.chunk_plan import ChunkPlan, plan_chunks
from isochunk.feedback import CompletionFeedback
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkDecision, ChunkReason, Prefill, Step
from isochunk.step_packing import WINDOW, StepPacker
from isochunk.step_target import OfferedLoad

# A chunk off the plan (the engine scheduled less than asked) may take this much longer than
# the plan's longest to get back on it.
OFF_PLAN_TOLERANCE = 1.05


MIN_NEW = 4
"""Completions of a prompt that are worth learning from before its end."""


class ShortestTTFT:
    """Plans a sole prefill, packs several by time.

    Args:
        pipeline: fitted stages, transfers between them, batches in flight; if it may keep a
            spare one, that is wanted for a prefill that is alone.
        max_num_batched_tokens: the engine's token budget of a step.
        alignment: chunk ends are multiples of this [tokens], a prompt's last one aside.
        num_in_flight: batches under way when the policy is installed.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        max_num_batched_tokens: int,
        alignment: int,
        num_in_flight: int = 0,
    ) -> None:
        if max_num_batched_tokens < 1 or alignment < 1:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} and "
                f"alignment={alignment} must be >= 1"
            )
        self._may_spare = pipeline.may_spare
        self._usual_depth = pipeline.depth
        if self._may_spare:
            pipeline = replace(pipeline, max_in_flight=pipeline.depth + 1, may_spare=False)
        self.feedback = CompletionFeedback(pipeline, num_in_flight)
        """Told of batches by the engine; corrects the models for later prompts."""
        self.pipeline = pipeline
        self.budget = max_num_batched_tokens
        self.alignment = alignment
        self.plan: ChunkPlan | None = None
        """The sole prefill's plan; None while there are several."""
        self.wants_spare_batch = False
        self._plan_key: tuple[str, int, int] = ("", 0, 0)
        self._packer = self._make_packer()
        self._load = OfferedLoad(self._usual_depth)
        self._last_cached = 0
        self._is_sole = True
        self._can_pack = True

    @property
    def target_ms(self) -> float:
        """Target time of a step on its slowest stage."""
        return self.plan.target_ms if self.plan is not None else self._packer.target.value_ms

    @property
    def offered_load(self) -> float:
        """How full the pipeline is when prompts arrive, 0 to 1."""
        return self._load.value

    def begin_step(self, step: Step) -> None:
        """Plan the step if it has several prefills; learn while there is nothing to size."""
        ids = [prefill[0] for prefill in step.prefills[:WINDOW]]
        self._load.begin_step(step, ids, self.feedback.num_in_flight)
        self._packer.end_step(self.feedback.num_in_flight)
        self._is_sole = len(ids) < 2 and not (ids and self._load.follows_others)
        self.wants_spare_batch = self._may_spare and step.is_alone
        if not self._is_sole:
            self.plan = None
            self._packer.begin_step(step, ids, self._load.value)
            self._can_pack = self._packer.target.value_ms < math.inf  # nor if it isn't a number
        elif not step.num_sources:
            self.feedback.learn(MIN_NEW)

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """The plan's next chunk, or this prefill's share of the step."""
        if num_allowed < 1 or prefill.num_remaining < 1:
            return ChunkDecision(max(num_allowed, 0), ChunkReason.UNREACHABLE)
        if not self._is_sole:
            if self._can_pack:
                return ChunkDecision(self._packer.size(prefill, num_allowed), ChunkReason.MODEL)
            return ChunkDecision(num_allowed, ChunkReason.UNREACHABLE)
        if num_allowed < min(self.alignment, self.budget, prefill.num_remaining):
            return ChunkDecision(num_allowed, ChunkReason.UNREACHABLE)
        plan = self._plan_for(prefill, num_allowed)
        if plan is None:
            return ChunkDecision(num_allowed, ChunkReason.UNREACHABLE)
        num_new = self._next_chunk(plan, prefill, num_allowed)
        self._packer.note_sole(prefill, num_new)
        return ChunkDecision(num_new, ChunkReason.MODEL)

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
        if self.budget // 2 <= num_allowed < min(budget, prefill.num_remaining) and (
            not is_same or plan is None or self._planned_end(plan, cached) - cached > num_allowed
        ):
            # Decode tokens take a part of the budget; keep the smaller one for this prompt.
            # Not a step that is nearly full already: its chunk is cut, the plan stays.
            budget, is_same = max(num_allowed - num_allowed % self.alignment, 1), False
        self._last_cached = cached
        if is_same:
            return plan
        # All chunks together on all stages: an upper bound of everything that is computed.
        stages = self.pipeline.stages
        worst_ms = sum(model.predict_ms(cached, prefill.num_remaining) for model in stages)
        if not math.isfinite(worst_ms * prefill.num_remaining):
            self.plan = None
            return None
        self._learn()
        planned = plan_chunks(self.pipeline, cached, prefill.num_remaining, budget, self.alignment)
        self.plan = planned
        self._plan_key = (prefill.request_id, cached + prefill.num_remaining, budget)
        return planned

    def _learn(self) -> None:
        """Take what earlier prompts have shown; the plan of a prompt under way stays."""
        self.feedback.learn(MIN_NEW)
        if self.feedback.pipeline is not self.pipeline:
            self.pipeline = self.feedback.pipeline
            self._packer = self._make_packer()

    def _make_packer(self) -> StepPacker:
        """The spare batch is for a sole prefill."""
        pipeline = replace(self.pipeline, max_in_flight=self._usual_depth)
        return StepPacker(pipeline, self.budget, self.alignment)

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


def _slowest_ms(stages: Sequence[LatencyModel], num_cached: int, num_new: int) -> float:
    return max(model.predict_ms(num_cached, num_new) for model in stages)
