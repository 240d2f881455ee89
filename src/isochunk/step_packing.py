"""Packing the prefills of a step up to a target time, when there are several.

Several prefills fill each other's bubbles; what is left is the step time. With S the remaining
work of all prompts on the slowest stage, the closed form of a single prefill gives the number of
steps ``K* = sqrt((P−1)·S / c)`` and with it the step's target time

    T* = c + S / K* = c + sqrt(S·c / (P−1))        c: what a step costs besides its tokens

Steps of equal time keep the stages in step, as chunks of equal time do. T* is set anew only
when the prompt set changes. Each step is packed first come, first served up to T* of predicted
time, and never longer than the step that fixed chunking would make of the same prompts.

*Starvation bound.* A prompt with less than the fraction σ = SHORT_SHARE of the head's remaining
work is *short*. Short prompts get σ of each step's time and tokens, first come, first served; a
waiting prompt ahead of one in the engine's queue, which can't be overtaken there, is admitted
with one alignment unit. With T = min(T*, t(0, budget)), a short prompt of work w and x tokens,
behind short prompts and admissions of work A and X tokens, is therefore scheduled within

    ceil((A + w) / (σ·(T − c) − u)) + ceil((X + x) / (σ·budget − alignment)) + 1 steps

(u: work of one alignment unit of the prompt), however long the head is. The others keep
1 − σ of each step, so they wait about 1/(1 − σ) times as long as first come, first served would
make them at most (not proven while T* changes). Both are about the first WINDOW prompts in
scheduling order; later ones wait to come into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isochunk.makespan import Pipeline
from isochunk.policies import Prefill, Step
from isochunk.stages import dominant_stages

SHORT_SHARE = 0.5
"""σ: what short prompts may take of a step, and what makes a prompt short."""
RESERVE_PAUSE = 8
"""Steps without a reserve after one that nobody could use; the bound is longer by these."""
WINDOW = 16
"""Prompts that are looked at one by one; those behind count as the mean of these."""


class StepPacker:
    """Sizes the prefills of a step, in scheduling order, so that they fill its target time."""

    def __init__(self, pipeline: Pipeline, budget: int, alignment: int) -> None:
        self.budget, self.alignment = budget, alignment
        self.target_ms = 0.0
        times = [model.predict_ms(0, budget) for model in pipeline.stages]
        self._slowest = pipeline.stages[times.index(max(times))]
        self._has_prefix_cost = self._slowest.prefix_ms > 0
        # The hot path computes t itself, from the coefficients: a call costs more than the sum.
        self._stages = [
            (model.fixed_ms, model.prefix_ms, model.token_ms, model.attention_ms)
            for model in dominant_stages(pipeline.stages)
        ]
        # P − 1 for equal stages: how many of the slowest stage's steps fill and drain take.
        self._bubbles = sum(times) / max(times) - 1.0
        # Of the prompt set:
        self._ids: list[str] = []
        self._num_prefills = 0
        self._shorts: set[str] = set()
        self._admit: set[str] = set()  # to be admitted if they still wait
        self._reached_at: list[int] = []  # positions of both
        # Of the step, without c:
        self._limit_ms = self._reserved_ms = 0.0
        self._tokens_left = self._reserved_tokens = 0
        self._used_ms = [0.0] * len(self._stages)
        self._packed: dict[str, tuple[int, int]] = {}  # request id -> cached, new
        self._waiting: set[str] = set()
        self._steps_without_reserve = 0

    def begin_step(self, step: Step) -> None:
        """Target, limit, and reserve for short prompts of this step."""
        num_prefills = len(step.prefills) + step.num_unlisted
        num_running = num_prefills if step.num_running is None else step.num_running
        prefills = step.prefills[:WINDOW]
        ids = [prefill[0] for prefill in prefills]
        self._waiting = set(ids[num_running:])
        packed = self._packed.keys()
        if (
            self._reserved_tokens
            and packed.isdisjoint(self._shorts)
            and packed.isdisjoint(self._admit)
        ):
            # Nobody could take the reserve: the engine admits no one now (slots, KV blocks).
            self._steps_without_reserve = RESERVE_PAUSE
        if ids != self._ids or num_prefills != self._num_prefills:
            self._ids, self._num_prefills = ids, num_prefills
            self._look_at(prefills, num_running)
        decodes = step.num_decode_tokens
        self._packed.clear()
        self._tokens_left = self.budget - decodes
        self._used_ms = [token * decodes for _, _, token, _ in self._stages]
        self._limit_ms = min(self.target_ms, self._fixed_ms(step.prefills))
        if self._steps_without_reserve and not self._shorts - self._waiting:
            self._steps_without_reserve -= 1
            self._reserved_ms, self._reserved_tokens = 0.0, 0
        else:
            self._reserve(prefills)

    def _look_at(self, prefills: Sequence[Prefill], num_running: int) -> None:
        """The prompt set has changed: target time, short prompts, prompts to admit."""
        model = self._slowest
        token_ms, attention_ms = model.token_ms, model.attention_ms
        works = [
            new * (token_ms + attention_ms * (2 * cached + new)) for _, cached, new in prefills
        ]
        total, step_ms = sum(works), model.fixed_ms
        if self._has_prefix_cost and total > 0:
            middles = (cached + 0.5 * new for _, cached, new in prefills)
            depth = sum(w * middle for w, middle in zip(works, middles, strict=True))
            step_ms += model.prefix_ms * depth / total
        total *= self._num_prefills / len(prefills)
        self.target_ms = step_ms + (
            math.sqrt(total * step_ms / self._bubbles) if self._bubbles > 0 else total
        )
        short_ms = SHORT_SHARE * works[0]
        self._shorts, self._admit, self._reached_at = set(), set(), []
        passed: list[int] = []
        for index, work in enumerate(works):
            if work < short_ms:
                self._shorts.add(self._ids[index])
                if passed:
                    self._admit.update(self._ids[i] for i in passed)
                    self._reached_at += passed
                    passed.clear()
                self._reached_at.append(index)
            elif index >= num_running and index:
                passed.append(index)

    def _fixed_ms(self, prefills: Sequence[Prefill]) -> float:
        """Time of the step that fixed chunking would make; stops where T* is exceeded."""
        worst = 0.0
        for (fixed, prefix, token, attention), decode_ms in zip(
            self._stages, self._used_ms, strict=True
        ):
            left, used = self._tokens_left, fixed + decode_ms
            for _, cached, remaining in prefills:
                if left <= 0 or used >= self.target_ms:
                    break
                new = min(remaining, left)
                left -= new
                used += prefix * cached + new * (token + attention * (2 * cached + new))
            worst = max(worst, used)
        return worst

    def _reserve(self, prefills: Sequence[Prefill]) -> None:
        """Time and tokens of this step that are kept for short prompts."""
        model = self._slowest
        prefix_ms, token_ms, attention_ms = model.prefix_ms, model.token_ms, model.attention_ms
        most_ms = SHORT_SHARE * max(self._limit_ms - model.fixed_ms, 0.0)
        most_tokens = int(SHORT_SHARE * self.budget)
        needed_ms, tokens = 0.0, 0
        for index in self._reached_at:
            if needed_ms >= most_ms or tokens >= most_tokens:
                break
            request_id, cached, new = prefills[index]
            if request_id in self._admit:
                if request_id not in self._waiting:
                    continue  # admitted
                new = min(new, self.alignment)
            needed_ms += prefix_ms * cached + new * (token_ms + attention_ms * (2 * cached + new))
            tokens += new
        self._reserved_ms = min(needed_ms, most_ms)
        self._reserved_tokens = min(tokens, most_tokens)

    def size(self, prefill: Prefill, num_allowed: int) -> int:
        """Tokens for this prefill; 0 where the step is full."""
        request_id, cached, remaining = prefill
        packed = self._packed
        if request_id in packed:
            # The engine asks again: forget that answer and those since.
            last = ""
            while last != request_id:
                last, piece = packed.popitem()
                self._add(*piece, -1)
        is_first = not packed
        limit_ms, new = self._limit_ms, num_allowed
        if is_first or request_id not in self._shorts:
            limit_ms -= self._reserved_ms
            unreserved = self._tokens_left - self._reserved_tokens
            new = min(new, unreserved)
        new = self._fill(limit_ms, cached, new) if new > 0 else 0
        if new < remaining:
            new = (cached + new) // self.alignment * self.alignment - cached
        if new <= 0:
            new = 0
            if is_first:
                new = min(self.alignment - cached % self.alignment, num_allowed)
            elif request_id in self._admit and request_id in self._waiting:
                unit = min(self.alignment - cached % self.alignment, num_allowed)
                new = unit if self._fill(self._limit_ms, cached, unit) == unit else 0
        elif (
            self._has_prefix_cost
            and new < remaining
            and not is_first
            and self._is_wasteful(cached, new)
        ):
            new = 0
        if new > 0:
            self._packed[request_id] = (cached, new)
            self._add(cached, new, 1)
        return new

    def _is_wasteful(self, cached: int, new: int) -> bool:
        """Whether a piece costs more for its prefix than for its tokens: better next step."""
        model = self._slowest
        tokens_ms = new * (model.token_ms + model.attention_ms * (2 * cached + new))
        return model.prefix_ms * cached > tokens_ms

    def _fill(self, limit_ms: float, cached: int, num_allowed: int) -> int:
        """How many of ``num_allowed`` tokens end within ``limit_ms`` on every stage."""
        new = num_allowed
        for (fixed, prefix, token, attention), used_ms in zip(
            self._stages, self._used_ms, strict=True
        ):
            free = limit_ms - used_ms - fixed - prefix * cached
            if free <= 0:
                return 0
            slope = token + 2 * attention * cached
            if new * (slope + attention * new) > free:
                # As LatencyModel.solve_num_new; exact up to rounding: don't lose a token to it.
                root = math.sqrt(slope * slope + 4 * attention * free)
                new = min(int(2 * free / (slope + root) + 1e-6), new)
        return new

    def _add(self, cached: int, new: int, sign: int) -> None:
        """Add a piece to the step, or take it out."""
        self._tokens_left -= sign * new
        for stage, (_, prefix, token, attention) in enumerate(self._stages):
            piece_ms = prefix * cached + new * (token + attention * (2 * cached + new))
            self._used_ms[stage] += sign * piece_ms
