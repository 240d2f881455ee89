"""Chunk policies: how many tokens a prefill gets in a step, and why.

A policy sees the step (:class:`Step`) and is then asked, prefill by prefill, in the order in
which the engine schedules them. It never asks for more than the engine allows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from isochunk.latency import LatencyModel

SOLE_PREFILL_WINDOW = 16
"""Scheduler steps that must all have had at most one prefill source (ATOM's guide)."""
MIN_ALIGNMENT = 64
MAX_MERGED_TIME = 1.2
"""A chunk may take this much longer to absorb the prompt's short rest, else they are split."""


class ChunkReason(StrEnum):
    """Why a chunk has its size; one counter each."""

    MODEL = "model"
    """Sized from the latency model."""
    CALIBRATION = "calibration"
    """Sized by the calibration, to measure."""
    UNREACHABLE = "unreachable"
    """Fixed budget: no equal-latency chunk was reachable."""
    OTHER_PREFILLS = "other_prefills"
    """Fixed budget: other prefills were present."""
    FIXED = "fixed"
    """Fixed budget: no model (yet), one-forward prefills, or asked for by the request."""


class Prefill(NamedTuple):
    """One prefill as the scheduler sees it in this step. Numbers are tokens."""

    request_id: str
    num_cached: int
    """``L``: tokens whose KV exists (computed before, or found in the prefix cache)."""
    num_remaining: int
    """Prompt tokens still to compute, at least 1."""


class Step(NamedTuple):
    """What a scheduler step has to deal with. Numbers are tokens."""

    prefills: Sequence[Prefill]
    """All prefill sources, running ones first, in scheduling order."""
    num_decode_tokens: int = 0
    num_running: int | None = None
    """How many of ``prefills``, from the first, are running; the others wait to be admitted.
    None: not known."""
    num_unlisted: int = 0
    """Further waiting prefill sources behind ``prefills``."""
    num_others: int = 0
    """Running requests besides ``prefills``: they decode, or their last chunk is in flight."""

    @property
    def num_sources(self) -> int:
        """All prefill sources."""
        return len(self.prefills) + self.num_unlisted

    @property
    def is_alone(self) -> bool:
        """One prefill, and nothing else is running or waiting."""
        return self.num_sources == 1 and self.num_others == 0


class ChunkDecision(NamedTuple):
    """A chunk size and the reason for it."""

    num_tokens: int
    reason: ChunkReason


class ChunkPolicy(Protocol):
    """Asked by the scheduler: first the step, then each of its prefills."""

    def begin_step(self, step: Step) -> None:
        """Take note of the step's prefills before any is sized; there may be none."""

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """Tokens for ``prefill``, in ``1..num_allowed``; ``num_allowed`` ≤ remaining.

        0 means "not in this step", which vLLM understands: it goes on to the next running
        request, and admits no further waiting ones. At least one of the prefills that run (the
        first, if none does) gets tokens in every step.
        """


def wants_spare_batch(policy: object) -> bool:
    """Whether one batch more than usual is to be in flight after the step that began last.

    With P batches in flight, chunks of equal time make the first stage wait at every step: its
    next chunk is scheduled when the one P before leaves the last stage, just when it becomes
    idle, and the way there and back is lost. A policy asks with an attribute of this name.
    """
    return bool(getattr(policy, "wants_spare_batch", False))


def chunk_alignment(block_size: int) -> int:
    """Alignment of chunk ends [tokens]: the smallest multiple of the KV block ≥ 64.

    ``max(block_size, 64)`` for every block size that divides or exceeds 64.
    """
    return block_size * math.ceil(MIN_ALIGNMENT / block_size)


class SolePrefillWindow:
    """Whether at most one prefill source was present in each of the last 16 steps."""

    def __init__(self, num_steps: int = SOLE_PREFILL_WINDOW) -> None:
        self._num_sources: deque[int] = deque(maxlen=num_steps)
        self._num_crowded = 0

    def add_step(self, num_sources: int) -> None:
        """Append a step with ``num_sources`` prefill sources."""
        if len(self._num_sources) == self._num_sources.maxlen:
            self._num_crowded -= self._num_sources[0] > 1
        self._num_sources.append(num_sources)
        self._num_crowded += num_sources > 1

    @property
    def is_sole(self) -> bool:
        """True if no step of the window had two or more prefill sources."""
        return self._num_crowded == 0


@dataclass(slots=True)
class FixedChunk:
    """Every chunk as large as allowed, or as ``num_tokens`` where that is less."""

    num_tokens: int | None = None

    def begin_step(self, step: Step) -> None:
        """Nothing to note."""

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """As many tokens as allowed, at most ``num_tokens``."""
        limit = num_allowed if self.num_tokens is None else min(self.num_tokens, num_allowed)
        return ChunkDecision(max(limit, 1), ChunkReason.FIXED)


class EqualLatency:
    """Chunks that take as long as the first one, for a sole prefill.

    ATOM's rule: the target is the predicted time of the initial chunk ``t(0, x0)`` with
    ``x0 = max_num_batched_tokens``; solve ``t(L, x) = target``, smooth with
    ``x0 + s·(x − x0)``, then apply the minimum chunk, the budget and the alignment.
    vLLM-Ascend's and SGLang's rule is the same with c = γ = 0.

    Args:
        model: of the slowest stage.
        initial_chunk: ``x0`` [tokens].
        smooth_factor: ``s`` in [0, 1]; 0 keeps the initial chunk, 1 follows the model.
        min_chunk: smallest chunk [tokens], below ``initial_chunk``.
        alignment: chunk ends are multiples of this [tokens], the prompt's last one aside.
    """

    def __init__(
        self,
        model: LatencyModel,
        initial_chunk: int,
        *,
        smooth_factor: float,
        min_chunk: int,
        alignment: int,
    ) -> None:
        if not 0 < min_chunk < initial_chunk:
            raise ValueError(
                f"min_chunk={min_chunk} must be in 1..{initial_chunk - 1} "
                f"(below the initial chunk of {initial_chunk} tokens)"
            )
        if not 0 <= smooth_factor <= 1:
            raise ValueError(f"smooth_factor={smooth_factor} must be in [0, 1]")
        self.model = model
        self.initial_chunk = initial_chunk
        self.smooth_factor = smooth_factor
        self.min_chunk = min_chunk
        self.alignment = alignment
        self.target_ms = model.predict_ms(0, initial_chunk)
        self._window = SolePrefillWindow()

    def begin_step(self, step: Step) -> None:
        """Update the window of the last steps' prefill sources."""
        self._window.add_step(step.num_sources)

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """An equal-latency chunk, or the fixed budget with the reason for it."""
        if not self._window.is_sole:
            return ChunkDecision(num_allowed, ChunkReason.OTHER_PREFILLS)
        solved = self.model.solve_num_new(self.target_ms, prefill.num_cached)
        if not solved >= 1:
            return ChunkDecision(num_allowed, ChunkReason.UNREACHABLE)
        smoothed = self.initial_chunk + self.smooth_factor * (
            min(solved, self.initial_chunk) - self.initial_chunk
        )
        wanted = max(round(smoothed), self.min_chunk)  # not int(): 4095.9999 is 4096
        merged_ms = MAX_MERGED_TIME * self.model.predict_ms(prefill.num_cached, wanted)
        merge_limit = self.model.solve_num_new(merged_ms, prefill.num_cached)
        return ChunkDecision(
            fit_chunk(
                prefill,
                wanted,
                num_allowed,
                min_chunk=self.min_chunk,
                alignment=self.alignment,
                merge_limit=int(min(merge_limit, num_allowed)),
            ),
            ChunkReason.MODEL,
        )


def fit_chunk(
    prefill: Prefill,
    num_wanted: int,
    num_allowed: int,
    *,
    min_chunk: int,
    alignment: int,
    merge_limit: int | None = None,
) -> int:
    """``num_wanted`` tokens, made a chunk that the engine likes. All in tokens.

    Ends on a multiple of ``alignment`` unless it is the prompt's last, and leaves no rest
    below ``min_chunk``: such a rest is merged into this chunk up to ``merge_limit`` (by
    default whatever is allowed); beyond that the two are split evenly, if that keeps both
    above the minimum or if merging would break the cap. Always in ``1..num_allowed``.
    """
    remaining = prefill.num_remaining
    num_wanted = min(num_wanted, num_allowed)
    if remaining <= num_wanted:
        return remaining
    if remaining - num_wanted < min_chunk:
        limit = num_allowed if merge_limit is None else min(merge_limit, num_allowed)
        if remaining <= limit or (remaining < 2 * min_chunk and remaining <= num_allowed):
            return remaining
        num_wanted = min(math.ceil(remaining / 2), num_allowed)
    end = prefill.num_cached + num_wanted
    down = end - end % alignment - prefill.num_cached
    if down >= (min_chunk if num_wanted >= min_chunk else 1):
        return down
    # Rounding down would go below the minimum (or to nothing): round up where that fits.
    up = down + alignment
    if up <= num_allowed and remaining - up >= min_chunk:
        return up
    return num_wanted
