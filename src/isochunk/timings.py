"""Timed batches: what was in them, and how an engine's timings find their way back.

An engine tags a batch on its way down to the workers; each stage answers with the tag and the
duration of its forward; :class:`TimingLedger` joins the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from isochunk.latency import LatencyModel
from isochunk.policies import ChunkReason, Prefill


class Piece(NamedTuple):
    """A prefill chunk in a batch: what was asked, the tokens scheduled, and why."""

    prefill: Prefill
    num_tokens: int
    reason: ChunkReason


class Timing(NamedTuple):
    """A timed forward on one rank."""

    tag: int
    start_s: float
    """Start by the host's monotonic clock."""
    latency_ms: float
    gap_ms: float = math.inf
    """Since the end of the timed forward before it: idle time and the engine's overhead."""


class TimedBatch(NamedTuple):
    """Timing of a batch on one stage (the slowest of its TP ranks), with its prefill chunks."""

    stage: int
    start_s: float
    latency_ms: float
    gap_ms: float
    pieces: tuple[Piece, ...]
    num_requests: int


class TimingLedger:
    """Tags that are out, completed or answered."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[tuple[Piece, ...], int]] = {}
        self._completed: list[int] = []
        self._next_tag = 0

    @property
    def outstanding(self) -> list[tuple[tuple[Piece, ...], int]]:
        """``(pieces, num_requests)`` of the tagged batches that wait for their timings."""
        return list(self._batches.values())

    @property
    def has_completed(self) -> bool:
        """Whether a tagged batch has run on every stage, so that asking is worthwhile."""
        return bool(self._completed)

    def tag(self, pieces: tuple[Piece, ...], num_requests: int) -> int:
        """A new tag for a batch with these prefill chunks."""
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._batches[tag] = (pieces, num_requests)
        return tag

    def complete(self, tag: int | None) -> None:
        """The batch has run on every stage. Unknown tags are ignored."""
        if tag in self._batches:
            self._completed.append(tag)

    def ask(self) -> list[int]:
        """Tags that the next answer settles."""
        asked, self._completed = self._completed, []
        return asked

    def settle(
        self, asked: Iterable[int], answers: Iterable[tuple[int, Sequence[Timing]]]
    ) -> list[TimedBatch]:
        """Join ``(stage, timings)`` of every rank with the batches they belong to.

        A tag in ``asked`` without a timing (e.g. a replayed graph) has none and is dropped.
        """
        slowest: dict[tuple[int, int], Timing] = {}  # (tag, stage) -> slowest TP rank
        for stage, timings in answers:
            for timing in timings:
                key = (timing.tag, stage)
                if key not in slowest or timing.latency_ms > slowest[key].latency_ms:
                    slowest[key] = timing
        timed = [
            TimedBatch(stage, *timing[1:], *self._batches[tag])
            for (tag, stage), timing in slowest.items()
            if tag in self._batches
        ]
        for tag in asked:
            self._batches.pop(tag, None)
        return timed


class TimingFetcher:
    """Gets timings from an engine's workers without making it wait.

    Args:
        ledger: knows which batches have completed.
        fetch: starts asking all ranks; a future of their ``(stage, timings)``.
        settle: takes the tags asked for and the answers.
    """

    def __init__(
        self,
        ledger: TimingLedger,
        fetch: Callable[[], Future[Any]],
        settle: Callable[[Sequence[int], Any], None],
    ) -> None:
        self._ledger, self._fetch, self._settle = ledger, fetch, settle
        self._answer: tuple[Future[Any], list[int]] | None = None

    def poll(self) -> None:
        """Take an answer that is here; ask for more where batches have completed."""
        if self._answer is not None and self._answer[0].done():
            self._take()
        if self._answer is None and self._ledger.has_completed:
            self._answer = (self._fetch(), self._ledger.ask())

    def flush(self) -> None:
        """Take everything. Only with no batch in flight: idle workers answer at once."""
        while self._answer is not None or self._ledger.has_completed:
            if self._answer is not None:
                self._take()
            else:
                self._answer = (self._fetch(), self._ledger.ask())

    def _take(self) -> None:
        assert self._answer is not None
        (future, asked), self._answer = self._answer, None
        self._settle(asked, future.result())


class TraceFile:
    """JSON lines: a batch on a stage (what ran when, how long, predicted how long) or a model."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  (open for good)

    def write_batch(self, batch: TimedBatch, predicted_ms: float | None) -> None:
        """Append what a stage did with a batch."""
        self._write(
            kind="batch",
            stage=batch.stage,
            start_s=batch.start_s,
            latency_ms=batch.latency_ms,
            predicted_ms=predicted_ms,
            num_requests=batch.num_requests,
            pieces=[
                {
                    "request_id": piece.prefill.request_id,
                    "num_cached": piece.prefill.num_cached,
                    "num_new": piece.num_tokens,
                    "reason": piece.reason,
                }
                for piece in batch.pieces
            ],
        )

    def write_models(self, models: Sequence[LatencyModel]) -> None:
        """Append the installed models, one line per stage."""
        for stage, model in enumerate(models):
            self._write(kind="model", stage=stage, **asdict(model))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")


def read_trace(path: str | Path, kind: str = "batch") -> list[dict[str, Any]]:
    """The lines of one kind in a trace file."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
