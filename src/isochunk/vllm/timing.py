"""Engine-core side of the timings: tags batches on the way down, collects on the way up."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from isochunk.policies import ChunkReason, Prefill
from isochunk.vllm import worker


class Piece(NamedTuple):
    """A prefill chunk in a batch: what was asked, the tokens scheduled, and why."""

    prefill: Prefill
    num_tokens: int
    reason: ChunkReason


class TimedChunk(NamedTuple):
    """Timings of a batch on one stage (the slowest of its TP ranks)."""

    stage: int
    start_s: float
    latency_ms: float
    pieces: tuple[Piece, ...]


class TimingCollector:
    """Tags batches and fetches their timings without making the engine wait.

    While batches are in flight, timings are fetched by a non-blocking RPC that is polled; once
    none is in flight all workers are idle and answer at once, so ``flush`` may wait for them.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._next_tag = 0
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._completed: list[int] = []
        self._fetch: tuple[Future[Any], list[int]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no tagged batch waits for its timings."""
        return not self._pieces

    def tag(self, scheduler_output: Any, pieces: tuple[Piece, ...]) -> None:
        """Have the workers time this batch."""
        self._pieces[self._next_tag] = pieces
        setattr(scheduler_output, worker.TAG, self._next_tag)
        self._next_tag += 1

    def batch_done(self, scheduler_output: Any) -> None:
        """The batch's output is back, so every stage has run it."""
        tag = getattr(scheduler_output, worker.TAG, None)
        if tag in self._pieces:
            self._completed.append(tag)

    def poll(self) -> list[TimedChunk]:
        """Timings that are here; asks for more where batches have completed."""
        chunks = []
        if self._fetch is not None and self._fetch[0].done():
            chunks = self._take()
        if self._fetch is None and self._completed:
            self._ask()
        return chunks

    def flush(self) -> list[TimedChunk]:
        """All timings of completed batches; only with no batch in flight."""
        chunks = self._take() if self._fetch is not None else []
        if self._completed:
            self._ask()
            chunks += self._take()
        return chunks

    def _ask(self) -> None:
        future = self._executor.collective_rpc(worker.drain, non_block=True)
        self._fetch, self._completed = (future, self._completed), []

    def _take(self) -> list[TimedChunk]:
        assert self._fetch is not None
        future, tags = self._fetch
        self._fetch = None
        # (tag, stage) -> timing of the slowest TP rank
        slowest: dict[tuple[int, int], worker.Timing] = {}
        for stage, timings in future.result():
            for timing in timings:
                key = (timing.tag, stage)
                if key not in slowest or timing.latency_ms > slowest[key].latency_ms:
                    slowest[key] = timing
        by_tag: dict[int, list[TimedChunk]] = defaultdict(list)
        for (tag, stage), timing in slowest.items():
            if tag in self._pieces:
                by_tag[tag].append(
                    TimedChunk(stage, timing.start_s, timing.latency_ms, self._pieces[tag])
                )
        for tag in tags:  # answered: a forward without a timing (replayed graph) has none
            self._pieces.pop(tag, None)
        return [chunk for chunks in by_tag.values() for chunk in chunks]


class TraceFile:
    """Appends one JSON line per batch and stage: what ran when, and what was predicted."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  (open for good)

    def write(self, chunk: TimedChunk, predicted_ms: float | None) -> None:
        """Append a line."""
        line = {
            "stage": chunk.stage,
            "start_s": chunk.start_s,
            "latency_ms": chunk.latency_ms,
            "predicted_ms": predicted_ms,
            "pieces": [
                {
                    "request_id": piece.prefill.request_id,
                    "num_cached": piece.prefill.num_cached,
                    "num_new": piece.num_tokens,
                    "reason": piece.reason,
                }
                for piece in chunk.pieces
            ],
        }
        self._file.write(json.dumps(line) + "\n")
