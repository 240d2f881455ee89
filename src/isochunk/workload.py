"""Requests for the simulator: a closed loop, Poisson arrivals, or a trace file."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from isochunk.csv_table import Column, read_table


class WorkloadError(ValueError):
    """A trace or an arrival is wrong; the message names file, line and field."""


class Request(NamedTuple):
    """A prompt and what is asked of it. Numbers are tokens."""

    num_prompt: int
    num_cached: int = 0
    """Prefix-cache hit."""
    num_output: int = 1


class Arrival(NamedTuple):
    """A request and the time [ms] at which it comes."""

    time_ms: float
    request: Request


class Workload(Protocol):
    """Where the simulator's requests come from."""

    def initial(self) -> Iterable[Arrival]:
        """Arrivals that don't depend on the simulation."""

    def on_finish(self, time_ms: float) -> Arrival | None:
        """A request has finished: what comes next because of it, if anything."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come whatever the server does."""

    arrivals: tuple[Arrival, ...]

    def initial(self) -> Iterable[Arrival]:
        """All of them."""
        return self.arrivals

    def on_finish(self, time_ms: float) -> Arrival | None:
        """Nothing."""
        return None


class ClosedLoop:
    """``concurrency`` clients that each send the next request when theirs has finished."""

    def __init__(self, requests: Sequence[Request], concurrency: int) -> None:
        if concurrency < 1:
            raise WorkloadError(f"concurrency={concurrency} must be >= 1")
        self.requests = tuple(requests)
        self.concurrency = concurrency
        self._next = 0

    def initial(self) -> Iterable[Arrival]:
        """The first ``concurrency`` requests, at time 0; starts over."""
        self._next = min(self.concurrency, len(self.requests))
        return [Arrival(0.0, request) for request in self.requests[: self._next]]

    def on_finish(self, time_ms: float) -> Arrival | None:
        """The next request, at once."""
        if self._next >= len(self.requests):
            return None
        self._next += 1
        return Arrival(time_ms, self.requests[self._next - 1])


def poisson(requests: Sequence[Request], rate_per_s: float, seed: int) -> OpenLoop:
    """Poisson arrivals at ``rate_per_s`` requests a second."""
    if not rate_per_s > 0:
        raise WorkloadError(f"rate_per_s={rate_per_s} must be > 0")
    rng = random.Random(seed)
    time_ms = 0.0
    arrivals = []
    for request in requests:
        time_ms += rng.expovariate(rate_per_s) * 1000.0
        arrivals.append(Arrival(time_ms, request))
    return OpenLoop(tuple(arrivals))


MAX_PROMPT = 10_000_000
"""[tokens] More is a mistake, such as a timestamp in the wrong column."""
MAX_TRACE_S = 1e7
"""[s], 116 days. More is a mistake, such as timestamps in another unit."""
TRACE_COLUMNS = (
    Column("timestamp", is_whole=False),
    Column("prompt_tokens", least=1, most=MAX_PROMPT),
    Column("cached_tokens"),
)


def read_arrivals(path: Path, num_output: int = 1) -> OpenLoop:
    """Arrivals from a CSV file with the columns timestamp [s], prompt_tokens, cached_tokens.

    In any order; the first one comes at time 0, so that timestamps may be any clock's.

    Raises:
        WorkloadError: the file can't be read or has no arrivals, a column is missing, a value
            isn't a number in its range, or the timestamps span more than MAX_TRACE_S.
    """
    arrivals = []
    for place, (timestamp, prompt, cached) in read_table(path, TRACE_COLUMNS, WorkloadError):
        if cached > prompt:
            raise WorkloadError(
                f"{place}: cached_tokens={cached:g} exceeds prompt_tokens={prompt:g}"
            )
        request = Request(int(prompt), int(cached), num_output)
        arrivals.append(Arrival(timestamp * 1000.0, request))
    if not arrivals:
        raise WorkloadError(f"{path}: no arrivals; expected a line a request")
    arrivals.sort(key=lambda arrival: arrival.time_ms)
    start_ms = arrivals[0].time_ms
    span_s = (arrivals[-1].time_ms - start_ms) / 1000.0
    if not span_s <= MAX_TRACE_S:
        raise WorkloadError(
            f"{path}: timestamp spans {span_s:g} s, at most {MAX_TRACE_S:g} s are expected; "
            "timestamps are in seconds"
        )
    return OpenLoop(tuple(Arrival(time_ms - start_ms, request) for time_ms, request in arrivals))
