"""What a simulation yields: batches on stages, and what became of each request."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from isochunk.makespan import Pipeline
from isochunk.policies import ChunkReason
from isochunk.workload import Request


class Piece(NamedTuple):
    """One request's share of a batch. Numbers are tokens."""

    request: int
    num_cached: int
    num_new: int
    is_decode: bool
    yields_token: bool
    """True for a decode and for a prompt's last chunk."""


class Span(NamedTuple):
    """When a batch occupied a stage."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A scheduled step: its pieces, and one span a stage."""

    index: int
    scheduled_ms: float
    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A finished request."""

    index: int
    request: Request
    arrival_ms: float
    first_token_ms: float
    finished_ms: float

    @property
    def ttft_ms(self) -> float:
        """Time from arrival to the first token."""
        return self.first_token_ms - self.arrival_ms


@dataclass(frozen=True, slots=True)
class Timeline:
    """A finished simulation."""

    pipeline: Pipeline
    batches: tuple[Batch, ...]
    requests: tuple[RequestResult, ...]
    reasons: Counter[ChunkReason] = field(default_factory=Counter)

    @property
    def makespan_ms(self) -> float:
        """From the first step to the last batch's end."""
        if not self.batches:
            return 0.0
        return self.batches[-1].spans[-1].end_ms - self.batches[0].scheduled_ms

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens (cached ones included) per second of makespan."""
        total = sum(result.request.num_prompt for result in self.requests)
        return 1000.0 * total / self.makespan_ms if self.makespan_ms > 0 else 0.0

    @property
    def mean_ttft_ms(self) -> float:
        """Mean over the requests."""
        return sum(result.ttft_ms for result in self.requests) / max(len(self.requests), 1)

    def ttft_percentile_ms(self, percent: float, max_prompt: float = math.inf) -> float:
        """Nearest-rank percentile of the TTFT of prompts of at most ``max_prompt`` tokens."""
        values = sorted(r.ttft_ms for r in self.requests if r.request.num_prompt <= max_prompt)
        if not values:
            return math.nan
        return values[max(math.ceil(percent / 100.0 * len(values)) - 1, 0)]

    def stage_busy_fraction(self, stage: int) -> float:
        """Fraction of the makespan in which a stage works; the rest is its bubbles."""
        busy = sum(b.spans[stage].end_ms - b.spans[stage].start_ms for b in self.batches)
        return busy / self.makespan_ms if self.makespan_ms > 0 else 0.0
