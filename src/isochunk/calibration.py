"""Calibration: from timed forwards to one installed model per stage, or a reason why not.

A state machine without clocks, threads or an engine::

    SWEEPING --add_sweep()--> PROBING --finish_prefill()--> INSTALLED
        \\                        \\--------------------------> GIVEN_UP
         \\--give_up()-----------------------------------------^

The rules are those of ATOM's guide: an attention-free startup sweep for b and c; then chunk
sizes that alternate between the budget and a quarter of it during the first single-prefill
requests; samples reduced by median per shape; residual, conditioning and uncertainty checks;
the model is installed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from isochunk.fitting import ChunkSample, FitReport, Refusal, fit_latency_model
from isochunk.latency import LatencyModel
from isochunk.policies import (
    ChunkDecision,
    ChunkReason,
    Prefill,
    SolePrefillWindow,
    Step,
    fit_chunk,
)

MAX_SWEEP_SIZES = 24
SWEEP_REPEATS = 2
"""Timed forwards per sweep size (the best counts), after one warm-up forward in all."""
PROBE_DIVISOR = 4
"""The small probe is the budget divided by this (ATOM's guide)."""
# Deepest useful chunk must be at least this much smaller than the initial one.
MIN_USEFUL_SHRINK = 0.10
# Order of the two probe sizes (0 = the large one) in successive requests: the sizes meet
# different prefixes in each, so that requests of one length still give many shapes.
PROBE_PATTERNS = ((0, 1), (1, 0), (0, 0, 1, 1), (1, 1, 0, 0))
# One request decides alone only if it was long; a second one guards against a bad moment.
MIN_REQUESTS = 2
ENOUGH_SHAPES = 12
OVERHEAD_QUANTILE = 0.25
MIN_GAPS = 8
# Probes whose timings never arrive (aborts, an executor that loses them) must end too.
MAX_PROBES_PER_SAMPLE = 3


def plan_sweep(max_tokens: int, alignment: int) -> tuple[int, ...]:
    """Up to 24 unique, increasing forward sizes [tokens] that end at ``max_tokens``.

    Multiples of ``alignment`` (the largest one aside), so that runtime shapes are covered.
    """
    if max_tokens < 1:
        return ()
    steps = np.linspace(0, max_tokens, MAX_SWEEP_SIZES + 1)[1:]
    sizes = {max(int(s) - int(s) % alignment, min(alignment, max_tokens)) for s in steps[:-1]}
    return (*sorted(s for s in sizes if s < max_tokens), max_tokens)


def plan_probes(
    budget: int, min_chunk: int, alignment: int, divisor: int = PROBE_DIVISOR
) -> tuple[int, ...]:
    """The two chunk sizes [tokens] to alternate, largest first; empty if they coincide."""
    large = budget - budget % alignment
    small = max(budget // divisor, min_chunk)
    small += -small % alignment
    return (large, small) if 0 < small < large else ()


class CalibrationPhase(StrEnum):
    """Where a calibration stands; the last two are final."""

    SWEEPING = "sweeping"
    PROBING = "probing"
    INSTALLED = "installed"
    GIVEN_UP = "given up"


@dataclass
class Calibrator:
    """Collects timings, decides probe sizes (it is a chunk policy), fits, and ends.

    Args:
        budget: ``max_num_batched_tokens``, the initial chunk [tokens].
        min_chunk: smallest chunk [tokens].
        alignment: of chunk ends [tokens].
        num_stages: pipeline stages that report timings.
        max_model_len: longest context [tokens]; where the useful shrink is judged.
        max_samples: runtime samples per stage at most, then the calibration gives up.
        probe_divisor: the small probe is the budget divided by this.
        needs_shrink: give up if equal-latency chunks would hardly shrink.
    """

    budget: int
    min_chunk: int
    alignment: int
    num_stages: int
    max_model_len: int
    max_samples: int = 30
    probe_divisor: int = PROBE_DIVISOR
    needs_shrink: bool = True
    phase: CalibrationPhase = CalibrationPhase.SWEEPING
    reason: str = ""
    reports: list[FitReport] = field(default_factory=list)
    sweeps: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[int, list[ChunkSample]] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    """Times between the end of a timed forward and the start of the next, on any stage."""

    def __post_init__(self) -> None:
        self._probes = plan_probes(self.budget, self.min_chunk, self.alignment, self.probe_divisor)
        self._window = SolePrefillWindow()
        self._request_id = ""
        self._pattern: tuple[int, ...] = PROBE_PATTERNS[0]
        self._next_probe = 0
        self._num_requests = 0
        self._num_probes = 0
        if not self._probes:
            self.give_up(
                f"no two probe sizes between the minimum chunk ({self.min_chunk} tokens) and "
                f"max_num_batched_tokens ({self.budget} tokens) at alignment {self.alignment}"
            )

    @property
    def is_final(self) -> bool:
        """Whether nothing will be measured any more."""
        return self.phase in (CalibrationPhase.INSTALLED, CalibrationPhase.GIVEN_UP)

    @property
    def models(self) -> list[LatencyModel]:
        """Installed models, one per stage (empty before)."""
        if self.phase is not CalibrationPhase.INSTALLED:
            return []
        return [report.model for report in self.reports if report.model is not None]

    def give_up(self, reason: str) -> None:
        """End without a model; the first reason stays."""
        if not self.is_final:
            self.phase, self.reason = CalibrationPhase.GIVEN_UP, reason

    def add_sweep(self, stage: int, timings: Sequence[tuple[int, float]]) -> None:
        """Add the startup sweep of a stage, ``(num_tokens, ms)``; the last stage starts probing."""
        if self.is_final:
            return
        if not timings:
            self.give_up(f"the startup sweep of stage {stage} has no timings")
            return
        self.sweeps[stage] = list(timings)
        if len(self.sweeps) == self.num_stages:
            self.phase = CalibrationPhase.PROBING

    # -- chunk policy ----------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Update the window of the last steps' prefill sources."""
        self._window.add_step(len(step.prefills))

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """The next probe size for a sole prefill of several chunks, else the fixed budget."""
        if self.phase is not CalibrationPhase.PROBING:
            return ChunkDecision(num_allowed, ChunkReason.FIXED)
        if not self._window.is_sole:
            return ChunkDecision(num_allowed, ChunkReason.OTHER_PREFILLS)
        if prefill.request_id != self._request_id:
            if prefill.num_remaining <= self.budget:  # one chunk: nothing to learn about a
                return ChunkDecision(num_allowed, ChunkReason.FIXED)
            self._request_id = prefill.request_id
            self._pattern = PROBE_PATTERNS[self._num_requests % len(PROBE_PATTERNS)]
            self._next_probe = 0
            self._num_requests += 1
        wanted = self._probes[self._pattern[self._next_probe % len(self._pattern)]]
        chunk = fit_chunk(
            prefill, wanted, num_allowed, min_chunk=self.min_chunk, alignment=self.alignment
        )
        return ChunkDecision(chunk, ChunkReason.CALIBRATION)

    def probe_scheduled(self) -> None:
        """The chunk of the last CALIBRATION decision went out: the other size is next."""
        self._next_probe += 1
        self._num_probes += 1

    # -- samples and fits ------------------------------------------------------------------

    def add_sample(self, stage: int, sample: ChunkSample, gap_ms: float = math.inf) -> None:
        """Add a timed chunk of a stage; ignored once final or past ``max_samples``.

        ``gap_ms`` is the time since the end of the forward before it on that stage.
        """
        samples = self.samples.setdefault(stage, [])
        if not self.is_final and len(samples) < self.max_samples:
            samples.append(sample)
            if math.isfinite(gap_ms) and gap_ms >= 0:
                self.gaps_ms.append(gap_ms)

    @property
    def step_overhead_ms(self) -> float:
        """What a step costs a stage between forwards (scheduling, messages, staging) [ms].

        A gap is that plus idle time, so a low quantile of the gaps is the overhead.
        """
        if len(self.gaps_ms) < MIN_GAPS:
            return 0.0
        return float(np.quantile(self.gaps_ms, OVERHEAD_QUANTILE))

    def finish_prefill(self) -> None:
        """A calibrated prefill's timings are in: fit, then install, go on or give up."""
        if self.phase is not CalibrationPhase.PROBING:
            return
        self.reports = [
            fit_latency_model(self.samples.get(stage, ()), self.sweeps.get(stage, ()))
            for stage in range(self.num_stages)
        ]
        num_shapes = min(report.num_shapes for report in self.reports)
        if self._num_requests < MIN_REQUESTS and num_shapes < ENOUGH_SHAPES:
            return
        refused = [
            f"stage {stage}: {report}"
            for stage, report in enumerate(self.reports)
            if not report.accepted
        ]
        if not refused:
            models = [report.model for report in self.reports if report.model is not None]
            shrink = useful_shrink(models, self.budget, self.max_model_len)
            if shrink >= MIN_USEFUL_SHRINK or not self.needs_shrink:
                self.phase = CalibrationPhase.INSTALLED
            else:
                self.give_up(
                    f"{Refusal.NO_USEFUL_SHRINK}: the deepest equal-latency chunk is only "
                    f"{shrink:.0%} smaller than max_num_batched_tokens ({self.budget})"
                )
            return
        full = all(len(self.samples.get(s, ())) >= self.max_samples for s in range(self.num_stages))
        if full or self._num_probes >= MAX_PROBES_PER_SAMPLE * self.max_samples:
            self.give_up(f"after {self._num_probes} probes: {'; '.join(refused)}")


def slowest_stage(models: Sequence[LatencyModel], num_cached: int, num_new: int) -> int:
    """Index of the stage that takes longest for such a chunk: it paces the pipeline."""
    times = [model.predict_ms(num_cached, num_new) for model in models]
    return times.index(max(times))


def useful_shrink(models: Sequence[LatencyModel], budget: int, max_model_len: int) -> float:
    """By what fraction the deepest equal-latency chunk is smaller than the initial one."""
    deepest = max(max_model_len - budget, 0)
    model = models[slowest_stage(models, deepest // 2, budget)]
    solved = model.solve_num_new(model.predict_ms(0, budget), deepest)
    return 1.0 - min(solved, budget) / budget
