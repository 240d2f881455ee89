"""Packing the prefills of a step up to a target time, when there are several.

Steps of equal time keep the stages in step, as chunks of equal time do. Each step is packed first
come, first served up to the target time T (:mod:`isochunk.step_target`), and never longer than
the step that fixed chunking would make of the same prompts.

*Ends.* A step may take longer than T to finish a prompt. With w more time that prompt ends a step
sooner; but all prompts that end in the step wait P·w, and those behind (P−1)·w, longer. So up to
w = T / (P·n + (P−1)·(N−n)), for n prompts of N that end.

*Starvation bound.* A prompt with less than the fraction σ = SHORT_SHARE of the head's remaining
work is *short*. Short prompts get σ of each step's time and tokens, first come, first served; a
waiting prompt ahead of one in the engine's queue, which can't be overtaken there, is admitted
with one alignment unit. With T' = min(T, t(0, budget)), a short prompt of work w and x tokens,
behind short prompts and admissions of work A and X tokens, is therefore scheduled within

    ceil((A + w) / (σ·(T' − c) − u)) + ceil((X + x) / (σ·budget − alignment)) + 1 steps

(u: work of one alignment unit of the prompt), however long the head is. The others keep
1 − σ of each step, so they wait about 1/(1 − σ) times as long as first come, first served would
make them at most (not proven while T changes). Both are about the first WINDOW prompts in
scheduling order; later ones wait to come into it.

*Turns.* A prefix cost (γ > 0) is paid by every piece, however small. Where the short prompts' share
would leave the head less than TURN_RATIO times its prefix cost, they take turns instead: one step
for the head, one for the short prompts that run. γL then counts as work in the bound above. One
waiting prompt is admitted in each of the head's steps, which may then take longer than the fixed
one, by its γL and one alignment unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from isochunk.makespan import Pipeline
from isochunk.policies import Prefill, Step
from isochunk.stages import dominant_stages
from isochunk.step_target import StepTarget

SHORT_SHARE = 0.5
"""σ: what short prompts may take of a step, and what makes a prompt short."""
RESERVE_PAUSE = 8
"""Steps without a reserve after one that nobody could use; the bound is longer by these."""
TURN_RATIO = 4.0
"""A step is shared if it leaves the head so many times its prefix cost, that cost included."""
WINDOW = 16
"""Prompts that are looked at one by one; those behind count as the mean of these."""
MAX_IN_FLIGHT = 16
"""Of the batches in flight, so many count as work that keeps the pipeline full."""


class StepPacker:
    """Sizes the prefills of a step, in scheduling order, so that they fill its target time."""

    def __init__(self, pipeline: Pipeline, budget: int, alignment: int) -> None:
        self.budget, self.alignment = budget, alignment
        self.target = StepTarget(pipeline)
        self._num_stages = pipeline.num_stages
        times = [model.predict_ms(0, budget) for model in pipeline.stages]
        self._slowest = pipeline.stages[times.index(max(times))]
        # The hot path computes t itself, from the coefficients: a call costs more than the sum.
        self._stages = [
            (model.fixed_ms, model.prefix_ms, model.token_ms, model.attention_ms)
            for model in dominant_stages(pipeline.stages)
        ]
        # Of whichever stage: deep in a prompt another one may be the slowest.
        self._prefix_ms = max(prefix for _, prefix, _, _ in self._stages)
        # Tokens and token pairs of the batches before this step, as many as may be in flight.
        num_before = min(pipeline.depth - 1, MAX_IN_FLIGHT)
        self._in_flight: deque[tuple[int, int]] = deque(maxlen=num_before)
        # Of the prompt set:
        self._ids: list[str] = []
        self._num_prefills = 0
        self._shorts: set[str] = set()
        self._admit: set[str] = set()  # to be admitted if they still wait
        self._reached_at: list[int] = []  # positions of both
        # Of the step:
        self._limit_ms = self._cap_ms = self._reserved_ms = 0.0
        self._tokens_left = self._reserved_tokens = self._num_ends = 0
        self._used_ms = [0.0] * len(self._stages)  # without c
        self._packed: dict[str, tuple[int, int, bool]] = {}  # request id -> cached, new, is last
        self._waiting: set[str] = set()
        self._is_turn = False  # the short prompts'
        self._admitting: str | None = None  # who is admitted in the head's turn; "" nobody yet
        self._steps_without_reserve = 0

    def end_step(self, num_in_flight: int) -> None:
        """Close the step before the next one; ``num_in_flight``: batches."""
        packed = self._packed
        if (
            self._reserved_tokens
            and packed.keys().isdisjoint(self._shorts)
            and packed.keys().isdisjoint(self._admit)
        ):
            # Nobody could take the reserve: the engine admits no one now (slots, KV blocks).
            self._steps_without_reserve = RESERVE_PAUSE
        self._reserved_tokens = 0
        if not num_in_flight:
            self._in_flight.clear()
        elif packed:
            tokens = area = 0
            for cached, new, _ in packed.values():
                tokens += new
                area += new * (2 * cached + new)
            self._in_flight.append((tokens, area))
        packed.clear()

    def note_sole(self, prefill: Prefill, num_new: int) -> None:
        """The step's only prefill gets so many tokens, decided elsewhere."""
        self._packed[prefill[0]] = (prefill[1], num_new, False)

    def begin_step(self, step: Step, ids: list[str], load: float) -> None:
        """Target, limit, and reserve for short prompts of this step.

        ``ids``: of the first WINDOW prefills. ``load``: see :mod:`isochunk.step_target`.
        """
        num_prefills = len(step.prefills) + step.num_unlisted
        num_running = num_prefills if step.num_running is None else step.num_running
        prefills = step.prefills[:WINDOW]
        self._waiting = set(ids[num_running:])
        if ids != self._ids or num_prefills != self._num_prefills:
            self._ids, self._num_prefills = ids, num_prefills
            self._look_at(prefills, num_running, load)
        decodes = step.num_decode_tokens
        self._num_ends = 0
        self._tokens_left = self.budget - decodes
        self._used_ms = [token * decodes for _, _, token, _ in self._stages]
        target_ms = self.target.value_ms
        self._cap_ms = self._fixed_ms(step.prefills, target_ms * (1.0 + 1.0 / self._num_stages))
        self._limit_ms = min(target_ms, self._cap_ms)
        if self._prefix_ms > 0:
            self._raise_limit(step.prefills, prefills[0][1])
        if self._steps_without_reserve and not self._shorts - self._waiting:
            self._steps_without_reserve -= 1
            self._reserved_ms, self._reserved_tokens = 0.0, 0
            self._is_turn, self._admitting = False, None
        else:
            self._reserve(prefills)

    def _look_at(self, prefills: Sequence[Prefill], num_running: int, load: float) -> None:
        """The prompt set has changed: target time, short prompts, prompts to admit."""
        # One loop for all: this is the hot path.
        token_ms, attention_ms = self._slowest.token_ms, self._slowest.attention_ms
        tokens = area = 0
        short_ms = 0.0  # the head isn't short
        shorts: set[str] = set()
        admit: set[str] = set()
        reached_at: list[int] = []
        passed: list[int] = []
        for index, (request_id, cached, new) in enumerate(prefills):
            pairs = new * (2 * cached + new)
            tokens += new
            area += pairs
            work_ms = new * token_ms + attention_ms * pairs
            if work_ms < short_ms:
                shorts.add(request_id)
                if passed:
                    admit.update([self._ids[i] for i in passed])
                    reached_at += passed
                    passed = []
                reached_at.append(index)
            elif not index:
                short_ms = SHORT_SHARE * work_ms
            elif index >= num_running:
                passed.append(index)
        self._shorts, self._admit, self._reached_at = shorts, admit, reached_at
        before_tokens = before_area = 0
        for more_tokens, more_area in self._in_flight:
            before_tokens += more_tokens
            before_area += more_area
        unlisted = self._num_prefills / len(prefills)
        depth = 0.5 * area / tokens if self._prefix_ms > 0 else 0.0  # of the mean token
        self.target.update(
            (tokens * unlisted, area * unlisted, depth),
            self._num_prefills,
            (before_tokens, before_area),
            load,
        )

    def _fixed_ms(self, prefills: Sequence[Prefill], most_ms: float) -> float:
        """Time of the step that fixed chunking would make, ``most_ms`` at most."""
        worst = 0.0
        for (fixed, prefix, token, attention), decode_ms in zip(
            self._stages, self._used_ms, strict=True
        ):
            left, used = self._tokens_left, fixed + decode_ms
            for _, cached, remaining in prefills:
                if left <= 0 or used >= most_ms:
                    break
                new = min(remaining, left)
                left -= new
                used += prefix * cached + new * (token + attention * (2 * cached + new))
            worst = max(worst, used)
        return min(worst, most_ms)

    def _raise_limit(self, prefills: Sequence[Prefill], cached: int) -> None:
        """As much time for the first piece's tokens as for its prefix, if fixed chunks take it."""
        needed_ms = max(
            fixed + used + 2 * prefix * cached
            for (fixed, prefix, _, _), used in zip(self._stages, self._used_ms, strict=True)
        )
        if needed_ms > self._limit_ms:
            self._limit_ms = max(self._limit_ms, self._fixed_ms(prefills, needed_ms))
            self._cap_ms = max(self._limit_ms, self._cap_ms)

    def _reserve(self, prefills: Sequence[Prefill]) -> None:
        """Time and tokens of this step that are kept for short prompts, or whose turn it is."""
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
        was_turn, self._is_turn, self._admitting = self._is_turn, False, None
        if self._prefix_ms > 0 and tokens:
            head_ms = self._prefix_ms * prefills[0][1]
            if self._limit_ms - self._reserved_ms < model.fixed_ms + TURN_RATIO * head_ms:
                self._take_turns(prefills, head_ms, was_turn)

    def _take_turns(self, prefills: Sequence[Prefill], head_ms: float, was_turn: bool) -> None:
        """The step is the head's, after one of the short prompts; else theirs."""
        running_ids = self._shorts - self._waiting
        running = [prefills[i] for i in self._reached_at if self._ids[i] in running_ids]
        self._is_turn = bool(running) and not was_turn
        if self._is_turn:
            self._raise_limit(prefills, running[0][1])
            free_ms = self._limit_ms - self._slowest.fixed_ms
            self._reserved_ms = sum(self._piece_ms(cached, new) for _, cached, new in running)
            self._reserved_tokens = sum(new for _, _, new in running)
            if free_ms - self._reserved_ms < 2.0 * head_ms:  # not worth the head's prefix cost
                self._reserved_ms, self._reserved_tokens = free_ms, self._tokens_left
            return
        # One that waits is admitted on top of the step: within it, its prefix could take it all.
        self._admitting = ""
        self._reserved_ms = 0.0
        self._reserved_tokens = min(self.alignment, self._reserved_tokens)

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
        limit_ms, most, is_others_turn = self._limit_ms, num_allowed, False
        if request_id not in self._shorts:
            limit_ms -= self._reserved_ms
            unreserved = self._tokens_left - self._reserved_tokens
            most = unreserved if unreserved < most else most  # min() is slower
            is_others_turn = self._is_turn
        new = self._fit(limit_ms, cached, most, remaining) if most > 0 else 0
        if new < remaining:
            new = (cached + new) // self.alignment * self.alignment - cached
        if new <= 0:
            new = 0
            if not packed and not is_others_turn:
                new = self._unit(cached, num_allowed)
            elif request_id in self._admit and request_id in self._waiting:
                unit = self._unit(cached, num_allowed)
                new = unit if self._fill(self._limit_ms, cached, unit) == unit else 0
        elif self._prefix_ms > 0 and new < remaining and packed and self._is_wasteful(cached, new):
            new = 0
        if not new and self._admitting is not None and self._may_admit(request_id):
            self._admitting = request_id
            new = self._unit(cached, num_allowed)
        if new > 0:
            piece = (cached, new, new == remaining)
            packed[request_id] = piece
            self._add(*piece, 1)
        return new

    def _fit(self, limit_ms: float, cached: int, most: int, remaining: int) -> int:
        """What of ``most`` tokens fits into the step; a prompt's end may take it longer."""
        new = self._fill(limit_ms, cached, most)
        if 0 < new < remaining == most and limit_ms == self._limit_ms:
            ends = self._num_ends + 1
            delays = self._num_stages * ends + (self._num_stages - 1) * (self._num_prefills - ends)
            later_ms = min(limit_ms + self.target.value_ms / delays, self._cap_ms)
            if self._fill(later_ms, cached, most) == most:
                return most
        return new

    def _unit(self, cached: int, num_allowed: int) -> int:
        """The least that is scheduled: up to the next aligned end."""
        return min(self.alignment - cached % self.alignment, num_allowed)

    def _may_admit(self, request_id: str) -> bool:
        """Whether it waits and is short, or in the way of one that is, and the first of these."""
        is_wanted = request_id in self._shorts or request_id in self._admit
        return is_wanted and request_id in self._waiting and self._admitting in {"", request_id}

    def _piece_ms(self, cached: int, new: int) -> float:
        """A piece's time on the slowest stage."""
        model = self._slowest
        tokens_ms = new * (model.token_ms + model.attention_ms * (2 * cached + new))
        return model.prefix_ms * cached + tokens_ms

    def _is_wasteful(self, cached: int, new: int) -> bool:
        """Whether a piece costs more for its prefix than for its tokens: better next step."""
        tokens_ms = self._piece_ms(cached, new) - self._slowest.prefix_ms * cached
        return self._prefix_ms * cached > tokens_ms

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

    def _add(self, cached: int, new: int, is_last: bool, sign: int) -> None:
        """Add a piece to the step, or take it out."""
        self._tokens_left -= sign * new
        self._num_ends += sign * is_last
        for stage, (_, prefix, token, attention) in enumerate(self._stages):
            piece_ms = prefix * cached + new * (token + attention * (2 * cached + new))
            self._used_ms[stage] += sign * piece_ms
