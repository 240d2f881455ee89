"""Discrete-event simulator of a pipeline-parallel prefill worker.

It runs the same :class:`~isochunk.policies.ChunkPolicy` objects as an engine and packs steps as
vLLM does: running requests first, in order of admission, then waiting ones, each up to the
token budget. A step is scheduled as soon as fewer than P batches are in flight (P + 1 while the
policy wants a spare one and the pipeline may keep it); ``num_computed_tokens`` advances when a
chunk is scheduled, so chunks of one prompt overlap across stages. A request's next decode token
waits for the one before.

A batch costs on each stage ``c + Σ (γL + b·x + a(2Lx + x²))`` over its prefill pieces: the
fixed cost once, the rest per piece. A decode token is a piece with x = 1 and γ = 0 (decoding
reads the cached prefix in place, nothing is rebuilt).

Events are taken in the order ``(time, kind, sequence)``. At the same instant batches complete
first (room in the queue, tokens back), then requests arrive, then the engine schedules; of one
kind, the one that was caused first. Within a stage nothing can be overtaken, so the times of a
batch on all its stages follow from the recurrence in :mod:`isochunk.makespan` as soon as it
is scheduled.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from isochunk.feedback import feedback_of
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkPolicy, ChunkReason, Prefill, Step, wants_spare_batch
from isochunk.timeline import Batch, Piece, RequestResult, Span, Timeline
from isochunk.workload import Request, Workload


class SimulationError(RuntimeError):
    """A policy broke its contract: a size out of range, or no progress."""


class EventKind(IntEnum):
    """Order of simultaneous events."""

    BATCH_DONE = 0
    ARRIVAL = 1
    SCHEDULE = 2


@dataclass(slots=True)
class _Running:
    """A request's state in the engine."""

    index: int
    request: Request
    arrival_ms: float
    num_computed: int
    num_output: int = 0
    is_token_pending: bool = False
    """The batch that yields its next token is in flight."""
    first_token_ms: float = 0.0

    @property
    def num_remaining(self) -> int:
        """Prompt tokens to schedule."""
        return self.request.num_prompt - self.num_computed

    def as_prefill(self) -> Prefill:
        """What a policy sees."""
        return Prefill(str(self.index), self.num_computed, self.num_remaining)


def simulate(
    pipeline: Pipeline,
    policy: ChunkPolicy,
    workload: Workload,
    max_num_batched_tokens: int,
    *,
    max_num_seqs: int = 256,
    noise: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Run a workload to its end.

    ``noise`` is the standard deviation of the logarithm of a batch's time on a stage.

    Raises:
        SimulationError: the policy sized a chunk out of range, or never lets a prompt go on.
    """
    if max_num_batched_tokens < 1 or max_num_seqs < 1:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} and "
            f"max_num_seqs={max_num_seqs} must be >= 1"
        )
    simulation = _Simulation(pipeline, policy, workload, max_num_batched_tokens, max_num_seqs)
    simulation.noise, simulation.rng = noise, random.Random(seed)
    return simulation.run()


class _Simulation:
    def __init__(
        self,
        pipeline: Pipeline,
        policy: ChunkPolicy,
        workload: Workload,
        budget: int,
        max_num_seqs: int,
    ) -> None:
        self.pipeline, self.policy, self.workload = pipeline, policy, workload
        self.feedback = feedback_of(policy)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.events: list[tuple[float, EventKind, int, Request | Batch | None]] = []
        self.sequence = count()
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.stage_free_ms = [0.0] * pipeline.num_stages
        self.num_in_flight = 0
        self.num_requests = 0
        self.batches: list[Batch] = []
        self.results: list[RequestResult] = []
        self.reasons: Counter[ChunkReason] = Counter()
        self.noise, self.rng = 0.0, random.Random(0)

    def run(self) -> Timeline:
        for arrival in self.workload.initial():
            self._push(arrival.time_ms, EventKind.ARRIVAL, arrival.request)
        while self.events:
            now_ms, kind, _, payload = heapq.heappop(self.events)
            if isinstance(payload, Batch):
                self._complete(now_ms, payload)
            elif isinstance(payload, Request):
                self._arrive(now_ms, payload)
            else:
                self._schedule_all(now_ms)
            # One SCHEDULE after the instant's last completion or arrival.
            if kind is not EventKind.SCHEDULE and not (
                self.events and self.events[0][:2] <= (now_ms, EventKind.SCHEDULE)
            ):
                self._push(now_ms, EventKind.SCHEDULE, None)
        if self.running or self.waiting:
            raise SimulationError(
                f"no progress: {len(self.running)} running and {len(self.waiting)} waiting "
                "requests are left, and the policy schedules none of them"
            )
        self.results.sort(key=lambda result: result.index)
        return Timeline(self.pipeline, tuple(self.batches), tuple(self.results), self.reasons)

    def _push(self, time_ms: float, kind: EventKind, payload: Request | Batch | None) -> None:
        heapq.heappush(self.events, (time_ms, kind, next(self.sequence), payload))

    def _arrive(self, now_ms: float, request: Request) -> None:
        # vLLM recomputes at least the last prompt token, whatever the cache holds.
        cached = min(request.num_cached, request.num_prompt - 1)
        self.waiting.append(_Running(self.num_requests, request, now_ms, cached))
        self.num_requests += 1

    def _complete(self, now_ms: float, batch: Batch) -> None:
        self.num_in_flight -= 1
        if self.feedback is not None:
            self.feedback.completed(now_ms)
        by_index = {state.index: state for state in self.running}
        for piece in batch.pieces:
            if not piece.yields_token:
                continue
            state = by_index[piece.request]
            state.is_token_pending = False
            state.num_output += 1
            if state.num_output == 1:
                state.first_token_ms = now_ms
            if state.num_output >= state.request.num_output:
                self._finish(now_ms, state)

    def _finish(self, now_ms: float, state: _Running) -> None:
        self.running.remove(state)
        self.results.append(
            RequestResult(
                state.index, state.request, state.arrival_ms, state.first_token_ms, now_ms
            )
        )
        if (arrival := self.workload.on_finish(now_ms)) is not None:
            self._push(arrival.time_ms, EventKind.ARRIVAL, arrival.request)

    def _schedule_all(self, now_ms: float) -> None:
        pipeline = self.pipeline
        while self.num_in_flight < pipeline.depth + (
            pipeline.may_spare and wants_spare_batch(self.policy)
        ):
            pieces = self._pack()
            if not pieces:
                break
            self._dispatch(now_ms, tuple(pieces))

    def _pack(self) -> list[Piece]:
        """One step: what vLLM's ``Scheduler.schedule`` would put into it."""
        running = [s.as_prefill() for s in self.running if s.num_remaining > 0]
        waiting = [s.as_prefill() for s in self.waiting]
        decodes = sum(1 for s in self.running if s.num_remaining == 0 and not s.is_token_pending)
        if self.running or waiting:
            others = len(self.running) - len(running)
            self.policy.begin_step(Step(running + waiting, decodes, len(running), 0, others))
        left = self.budget
        pieces: list[Piece] = []
        for state in self.running:
            if left == 0:
                break
            if state.num_remaining > 0:
                num_new = self._size(state, left)
                if num_new == 0:
                    continue
                pieces.append(self._advance(state, num_new))
                left -= num_new
            elif not state.is_token_pending:
                state.is_token_pending = True
                length = state.request.num_prompt + state.num_output - 1
                pieces.append(Piece(state.index, length, 1, True, True))
                left -= 1
        while left > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            num_new = self._size(self.waiting[0], left)
            if num_new == 0:
                break
            state = self.waiting.popleft()
            self.running.append(state)
            pieces.append(self._advance(state, num_new))
            left -= num_new
        return pieces

    def _size(self, state: _Running, left: int) -> int:
        allowed = min(state.num_remaining, left)
        decision = self.policy.size(state.as_prefill(), allowed)
        if not 0 <= decision.num_tokens <= allowed:
            raise SimulationError(
                f"request {state.index}: the policy sized {decision.num_tokens} tokens, "
                f"allowed are 0..{allowed}"
            )
        if decision.num_tokens:
            self.reasons[decision.reason] += 1
        return decision.num_tokens

    def _advance(self, state: _Running, num_new: int) -> Piece:
        num_cached = state.num_computed
        state.num_computed += num_new
        is_last = state.num_remaining == 0
        state.is_token_pending = is_last
        return Piece(state.index, num_cached, num_new, False, is_last)

    def _dispatch(self, now_ms: float, pieces: tuple[Piece, ...]) -> None:
        spans = []
        transfer_ms = self.pipeline.transfer_ms(sum(piece.num_new for piece in pieces))
        ready_ms = now_ms
        for stage, exact_ms in enumerate(batch_times_ms(self.pipeline, pieces)):
            time_ms = exact_ms * math.exp(self.rng.gauss(0.0, self.noise))
            start_ms = max(ready_ms, self.stage_free_ms[stage])
            spans.append(Span(start_ms, start_ms + time_ms))
            self.stage_free_ms[stage] = start_ms + time_ms
            ready_ms = start_ms + time_ms + transfer_ms
        batch = Batch(len(self.batches), now_ms, pieces, tuple(spans))
        self.batches.append(batch)
        self.num_in_flight += 1
        if self.feedback is not None:
            self.feedback.scheduled(now_ms, _sole_chunk(pieces))
        self._push(spans[-1].end_ms, EventKind.BATCH_DONE, batch)


def _sole_chunk(pieces: tuple[Piece, ...]) -> tuple[int, int] | None:
    if len(pieces) != 1 or pieces[0].is_decode:
        return None
    return pieces[0].num_cached, pieces[0].num_new


def batch_times_ms(pipeline: Pipeline, pieces: tuple[Piece, ...]) -> list[float]:
    """Time [ms] of a batch on each stage; see the module's description for the formula."""
    prefix = sum(piece.num_cached for piece in pieces if not piece.is_decode)
    new = sum(piece.num_new for piece in pieces)
    area = sum(piece.num_new * (2 * piece.num_cached + piece.num_new) for piece in pieces)
    return [
        m.fixed_ms + m.prefix_ms * prefix + m.token_ms * new + m.attention_ms * area
        for m in pipeline.stages
    ]
