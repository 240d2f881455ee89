"""Calibration: from timed forwards to one installed model per stage, or a reason why not.

A state machine without clocks, threads or an engine::

    SWEEPING --> PROBING <--> CONFIRMING --> INSTALLED
        \\__________\\_____________\\_______> GIVEN_UP

The rules are those of ATOM's guide: an attention-free startup sweep for b and c; then chunk
sizes that alternate between the budget and fractions of it during the first single-prefill
requests; samples reduced by median per shape; residual, conditioning and uncertainty checks;
the model is installed once. One step is added: a fit that passes first sizes one prompt, whose
timings join the samples, because alternating sizes disturb each other (a small chunk after a
huge one finds cold caches) and because the chunks that matter are those that will be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from isochunk.fitting import ChunkSample, FitChecks, FitReport, Refusal, fit_latency_model
from isochunk.latency import LatencyModel
from isochunk.overhead import TimedRun, timed_runs
from isochunk.policies import (
    ChunkDecision,
    ChunkPolicy,
    ChunkReason,
    Prefill,
    SolePrefillWindow,
    Step,
    fit_chunk,
)
from isochunk.probes import PROBE_DIVISORS, PROBE_PATTERNS, longest_too_short, plan_probes
from isochunk.stages import useful_shrink

# Deepest useful chunk must be at least this much smaller than the initial one.
MIN_USEFUL_SHRINK = 0.10
# One request decides alone only if it was long; a second one guards against a bad moment.
MIN_REQUESTS = 2
ENOUGH_SHAPES = 12
# This part of the samples is kept for the prompt that confirms the fit.
CONFIRMING_SHARE = 1 / 3
MIN_PROBES = 7
# How often a refused fit is tried again with newer samples in place of the older half: a bad
# moment of the machine must not decide for good.
MAX_RETRIES = 4
# The first chunk after an idle time finds cold caches. That matters for one of less than this
# part of the budget, whose time would be taken for a large fixed cost.
COLD_SHARE = 4
# The confirming prompt's chunks go out whole, half, half, whole, …: what a chunk more costs
# decides how many there should be, so it is measured at the sizes in question.
HALVES_PERIOD = 3
# Other tokens (decodes) in a chunk's batch, as a part of the chunk, that don't spoil its time.
OTHER_TOKENS_SHARE = 0.01
# Probes whose timings never arrive (aborts, an executor that loses them) must end too.
MAX_PROBES_PER_SAMPLE = 3

PolicyFactory = Callable[[Sequence[LatencyModel]], ChunkPolicy]


class CalibrationPhase(StrEnum):
    """Where a calibration stands; the last two are final."""

    SWEEPING = "sweeping"
    PROBING = "probing"
    CONFIRMING = "confirming"
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
        max_samples: most runtime samples per stage that a fit uses.
        checks: what a fit must satisfy.
        probe_divisors: the probes besides the budget are the budget divided by these.
        needs_shrink: chunks start at the budget: give up if they would hardly shrink, and learn
            nothing from prompts that fit into one. If not, the number of chunks is the policy's
            to choose, and halves of them are tried, too, when a fit is confirmed.
        may_spare: keep one batch more in flight (see ``policies.wants_spare_batch``).
        make_policy: makes the policy that a fitted model would get, to confirm it.
    """

    budget: int
    min_chunk: int
    alignment: int
    num_stages: int
    max_model_len: int
    make_policy: PolicyFactory
    max_samples: int = 30
    checks: FitChecks = field(default_factory=FitChecks)
    probe_divisors: tuple[int, ...] = PROBE_DIVISORS
    needs_shrink: bool = True
    may_spare: bool = False
    phase: CalibrationPhase = CalibrationPhase.SWEEPING
    reason: str = ""
    reports: list[FitReport] = field(default_factory=list)
    sweeps: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[int, list[ChunkSample]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._probes = plan_probes(self.budget, self.min_chunk, self.alignment, self.probe_divisors)
        self._window = SolePrefillWindow()
        self._candidate: ChunkPolicy | None = None
        self._request_id = ""
        self._largest = self.budget
        self._pattern: tuple[int, ...] = ()
        self._next_probe = 0
        self._rest = (0, 0)  # of a chunk whose first half went out: start, end
        self._num_requests = 0
        self._num_retries = 0
        self._num_probes = 0
        self._num_decode_tokens = 0
        self.wants_spare_batch = False
        self.was_spared = self.may_spare
        """Whether all probes had the spare batch."""
        self._num_confirmed = 0
        self._timed: dict[int, list[tuple[ChunkSample, float]]] = {}
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
    def is_measuring(self) -> bool:
        """Whether timings of single prefills are wanted."""
        return self.phase in (CalibrationPhase.PROBING, CalibrationPhase.CONFIRMING)

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
        self._window.add_step(step.num_sources)
        self._num_decode_tokens = step.num_decode_tokens
        self.wants_spare_batch = self.may_spare and step.is_alone
        if self._candidate is not None:
            self._candidate.begin_step(step)

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """The next probe size for a sole prefill of several chunks, else the fixed budget."""
        if not self.is_measuring:
            return ChunkDecision(num_allowed, ChunkReason.FIXED)
        if not self._window.is_sole:
            return ChunkDecision(num_allowed, ChunkReason.OTHER_PREFILLS)
        if self._has_all_samples or self._num_decode_tokens > max_other_tokens(self._probes[-1]):
            return ChunkDecision(num_allowed, ChunkReason.FIXED)  # nothing to learn now
        if prefill.request_id != self._request_id:
            too_short = longest_too_short(self.budget, needs_shrink=self.needs_shrink)
            if prefill.num_remaining <= too_short:
                return ChunkDecision(num_allowed, ChunkReason.FIXED)
            self._request_id = prefill.request_id
            self._largest = self.budget if self.needs_shrink else -(-prefill.num_remaining // 2)
            patterns = PROBE_PATTERNS[len(self._probes)]
            self._pattern = patterns[self._num_requests % len(patterns)]
            self._next_probe, self._rest = 0, (0, 0)
            self._num_requests += 1
        if self._candidate is not None:
            return ChunkDecision(self._confirm(prefill, num_allowed), ChunkReason.CALIBRATION)
        wanted = self._probes[self._pattern[self._next_probe % len(self._pattern)]]
        wanted = min(wanted, self._largest)
        chunk = fit_chunk(
            prefill, wanted, num_allowed, min_chunk=self.min_chunk, alignment=self.alignment
        )
        return ChunkDecision(chunk, ChunkReason.CALIBRATION)

    def _confirm(self, prefill: Prefill, num_allowed: int) -> int:
        """The candidate's next chunk, or a half of it."""
        assert self._candidate is not None
        cached = prefill.num_cached
        start, end = self._rest
        if start == cached and 0 < end - start <= num_allowed:
            return end - start
        chunk = self._candidate.size(prefill, num_allowed).num_tokens
        half = (cached + chunk // 2) // self.alignment * self.alignment - cached
        if self.needs_shrink or self._next_probe % HALVES_PERIOD != 1 or half <= 0:
            return chunk
        self._rest = (cached + half, cached + chunk)
        return half

    def probe_scheduled(self) -> None:
        """The chunk of the last CALIBRATION decision went out: the other size is next."""
        self._next_probe += 1
        self._num_probes += 1
        self.was_spared &= self.wants_spare_batch
        if self._num_probes >= MAX_PROBES_PER_SAMPLE * self.max_samples:
            self.give_up(f"no model after {self._num_probes} probes")

    # -- samples and fits ------------------------------------------------------------------

    def add_sample(self, stage: int, sample: ChunkSample, gap_ms: float = math.inf) -> None:
        """Add a timed chunk of a stage; ignored once final or past ``max_samples``.

        ``gap_ms`` is the time since the end of the forward before it on that stage.
        """
        if not self.is_measuring:
            return
        self._timed.setdefault(stage, []).append((sample, gap_ms))
        is_cold = sample.num_cached == 0 and sample.num_new * COLD_SHARE < self.budget
        samples = self.samples.setdefault(stage, [])
        if len(samples) < self._sample_limit and not is_cold:
            samples.append(sample)
            self._num_confirmed += self._candidate is not None

    @property
    def runs(self) -> list[TimedRun]:
        """All samples with the gaps between them, prompt by prompt."""
        return timed_runs([self._timed.get(stage, []) for stage in range(self.num_stages)])

    @property
    def _has_all_samples(self) -> bool:
        return all(
            len(self.samples.get(stage, ())) >= self._sample_limit
            for stage in range(self.num_stages)
        )

    @property
    def _sample_limit(self) -> int:
        num_probing = max(self.max_samples - int(CONFIRMING_SHARE * self.max_samples), MIN_PROBES)
        if self.phase is CalibrationPhase.CONFIRMING:
            return max(self.max_samples, num_probing + 1)
        return num_probing

    def finish_prefill(self) -> None:
        """A calibrated prefill's timings are in: fit, then confirm, install, go on or give up."""
        if not self.is_measuring or (self._candidate is not None and not self._num_confirmed):
            return
        self.reports = [
            fit_latency_model(self.samples.get(stage, ()), self.sweeps.get(stage, ()), self.checks)
            for stage in range(self.num_stages)
        ]
        num_shapes = min(report.num_shapes for report in self.reports)
        is_early = self._num_requests < MIN_REQUESTS and num_shapes < ENOUGH_SHAPES
        if is_early and not self._has_all_samples:
            return
        refused = [
            f"stage {stage}: {report}"
            for stage, report in enumerate(self.reports)
            if not report.accepted
        ]
        if not refused:
            self._accept([report.model for report in self.reports if report.model is not None])
            return
        self.phase, self._candidate, self._num_confirmed = CalibrationPhase.PROBING, None, 0
        if self._has_all_samples:
            self._retry(f"after {self._num_probes} probes: {'; '.join(refused)}")

    def _retry(self, reason: str) -> None:
        """Make room for new samples, or give up."""
        if self._num_retries == MAX_RETRIES:
            self.give_up(reason)
            return
        self._num_retries += 1
        for samples in self.samples.values():
            del samples[: -(self._sample_limit // 2)]

    def _accept(self, models: list[LatencyModel]) -> None:
        """The fit passed: have it size a prompt, or, if it has, install it."""
        shrink = useful_shrink(models, self.budget, self.max_model_len)
        if self.needs_shrink and shrink < MIN_USEFUL_SHRINK:
            self.give_up(
                f"{Refusal.NO_USEFUL_SHRINK}: the deepest equal-latency chunk is only "
                f"{shrink:.0%} smaller than max_num_batched_tokens ({self.budget})"
            )
        elif self._candidate is None:
            self.phase = CalibrationPhase.CONFIRMING
            self._candidate, self._request_id = self.make_policy(models), ""
        else:
            self.phase = CalibrationPhase.INSTALLED


def max_other_tokens(num_new: int) -> int:
    """Tokens of other requests that may share a timed chunk's batch."""
    return int(OTHER_TOKENS_SHARE * num_new)
