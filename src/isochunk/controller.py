"""What an engine talks to: sizes chunks, takes timings in, switches policy, counts.

An engine adapter calls ``begin_step``, ``size`` and ``end_step`` while it schedules,
``batch_done`` when a batch has run, and ``settle`` with timings that came back. Everything
else (window, probes, fit, installation, feedback, reasons) happens here, without engine or
thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from isochunk.calibration import CalibrationPhase, Calibrator, max_other_tokens
from isochunk.config import DynamicChunkingConfig
from isochunk.feedback import feedback_of
from isochunk.fitting import ChunkSample, FitChecks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.overhead import StepOverhead, fit_step_overhead
from isochunk.policies import (
    ChunkDecision,
    ChunkPolicy,
    ChunkReason,
    EqualLatency,
    FixedChunk,
    Prefill,
    Step,
    wants_spare_batch,
)
from isochunk.probes import PROBE_DIVISORS
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.stages import slowest_stage
from isochunk.timings import Piece, TimedBatch, Timing, TimingLedger, TraceFile

logger = logging.getLogger(__name__)

# Optimal chunks may be far smaller than a quarter of the budget; the fit must reach there.
AUTO_PROBE_DIVISORS = (8, 32)


class ChunkController:
    """Owns the calibrator, the policy in force, and the timings under way.

    Args:
        settings: smoothing factor, minimum chunk, calibration limits, trace file.
        max_num_batched_tokens: the step's token budget, and the initial chunk.
        alignment: of chunk ends [tokens].
        num_stages: pipeline stages.
        max_model_len: longest context [tokens].
        max_in_flight: batches that the engine keeps in flight; 0 means one per stage.
        can_spare: whether it can keep one more while ``wants_spare_batch``.
        clock: seconds; completions are observed with it.
    """

    def __init__(
        self,
        settings: DynamicChunkingConfig,
        *,
        max_num_batched_tokens: int,
        alignment: int,
        num_stages: int,
        max_model_len: int,
        max_in_flight: int = 0,
        can_spare: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.alignment = alignment
        self.max_in_flight = 0 if max_in_flight == num_stages else max_in_flight
        """Batches that the engine keeps in flight; 0: one per stage."""
        # Only auto: the other policies are as elsewhere, with what vLLM keeps in flight.
        self.may_spare = can_spare and settings.policy == "auto"
        is_equal_latency = settings.policy == "equal-latency"
        self.calibrator = Calibrator(
            budget=max_num_batched_tokens,
            # Only the equal-latency rule has a minimum chunk.
            min_chunk=settings.min_chunk_size if is_equal_latency else alignment,
            alignment=alignment,
            num_stages=num_stages,
            max_model_len=max_model_len,
            make_policy=lambda models: self._make_policy(settings.policy, models),
            max_samples=settings.max_calibration_samples,
            checks=FitChecks.with_error(settings.max_fit_error),
            probe_divisors=PROBE_DIVISORS if is_equal_latency else AUTO_PROBE_DIVISORS,
            needs_shrink=is_equal_latency,
            may_spare=self.may_spare,
        )
        self.policy: ChunkPolicy = self.calibrator
        self.counts: Counter[ChunkReason] = Counter()
        self.ledger = TimingLedger()
        self.num_in_flight = 0
        """Batches scheduled and not back yet."""
        self._clock = clock
        self._trace = TraceFile(settings.trace_file) if settings.trace_file else None
        self._decisions: dict[str, tuple[Prefill, ChunkDecision]] = {}
        self._is_overridden = False
        self._switched = False
        if settings.policy == "fixed":
            self.calibrator.give_up("policy=fixed asks for them")
        self._switch_if_final()

    @property
    def is_calibrating(self) -> bool:
        """Whether chunk timings are still wanted for the model."""
        return self.calibrator.is_measuring

    @property
    def needs_timing(self) -> bool:
        """Whether batches are tagged at all; false for good once it is false."""
        return self.is_calibrating or self._trace is not None

    @property
    def is_fixed_for_good(self) -> bool:
        """Whether the calibration was given up."""
        return self.calibrator.phase is CalibrationPhase.GIVEN_UP

    @property
    def wants_spare_batch(self) -> bool:
        """Whether one batch more than usual is to be in flight after this step."""
        return wants_spare_batch(self.policy) and not self._is_overridden

    @property
    def models(self) -> list[LatencyModel]:
        """Installed models by stage; empty before."""
        return self.calibrator.models

    def add_sweep(self, answers: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> None:
        """The startup sweep: ``(stage, [(num_tokens, ms), …])`` of every rank.

        A stage's time is that of its slowest TP rank.
        """
        slowest: dict[int, dict[int, float]] = {}
        for stage, timings in answers:
            times = slowest.setdefault(stage, {})
            for size, ms in timings:
                times[size] = max(ms, times.get(size, 0.0))
        for stage, times in sorted(slowest.items()):
            self.calibrator.add_sweep(stage, list(times.items()))
        self._switch_if_final()

    # -- one scheduler step ----------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Once per scheduler step, before any ``size``."""
        self._decisions.clear()
        self._is_overridden = False
        self.policy.begin_step(step)

    def size(self, prefill: Prefill, num_allowed: int, override: ChunkPolicy | None = None) -> int:
        """Tokens for this prefill in this step, in ``0..num_allowed``; 0: not in this step.

        ``override`` sizes it instead of the policy in force.
        """
        decision = (override or self.policy).size(prefill, num_allowed)
        self._is_overridden |= override is not None
        self._decisions[prefill.request_id] = (prefill, decision)
        return decision.num_tokens

    def end_step(self, scheduled: Mapping[str, int]) -> int | None:
        """What the step really scheduled, as request id -> tokens (decodes included).

        An engine may drop, cut or retry a chunk that it has sized: only this counts.

        Returns:
            A tag if the batch is to be timed, else None.
        """
        pieces = []
        for request_id, (prefill, decision) in self._decisions.items():
            if request_id in scheduled:
                pieces.append(Piece(prefill, scheduled[request_id], decision.reason))
                self.counts[decision.reason] += 1
                if decision.reason is ChunkReason.CALIBRATION:
                    self.calibrator.probe_scheduled()
                    self._switch_if_final()
        if scheduled:
            self.num_in_flight += 1
            if (feedback := feedback_of(self.policy)) is not None:
                is_usable = _is_alone(pieces, len(scheduled), ChunkReason.MODEL)
                chunk = (pieces[0].prefill.num_cached, pieces[0].num_tokens) if is_usable else None
                feedback.scheduled(self._clock() * 1e3, chunk)
        if not pieces or not self.needs_timing:
            return None
        if self._trace is None and not _is_sample(pieces, len(scheduled)):
            return None
        return self.ledger.tag(tuple(pieces), len(scheduled))

    def batch_done(self, tag: int | None) -> None:
        """The oldest batch with tokens is back from the last stage; its tag, if it has one."""
        self.num_in_flight -= 1
        if (feedback := feedback_of(self.policy)) is not None:
            feedback.completed(self._clock() * 1e3)
        self.ledger.complete(tag)

    # -- timings ---------------------------------------------------------------------------

    def settle(self, asked: Sequence[int], answers: Sequence[tuple[int, Sequence[Timing]]]) -> None:
        """Take in ``(stage, timings)`` of every rank, which settle the tags in ``asked``.

        Once no sample is under way, tries to fit and install the model.
        """
        for batch in self.ledger.settle(asked, answers):
            if _is_sample(batch.pieces, batch.num_requests):
                self.calibrator.add_sample(
                    batch.stage,
                    ChunkSample(
                        batch.pieces[0].prefill.num_cached,
                        batch.pieces[0].num_tokens,
                        batch.latency_ms,
                    ),
                    batch.gap_ms,
                )
            if self._trace is not None:
                self._trace.write_batch(batch, self._predict_ms(batch))
        if not any(_is_sample(*batch) for batch in self.ledger.outstanding):
            self.calibrator.finish_prefill()
            self._switch_if_final()

    def _predict_ms(self, batch: TimedBatch) -> float | None:
        if not self.models or batch.num_requests != 1:
            return None
        piece = batch.pieces[0]
        return self.models[batch.stage].predict_ms(piece.prefill.num_cached, piece.num_tokens)

    def _switch_if_final(self) -> None:
        """Install the policy that stays, once, and say so."""
        if self._switched or not self.calibrator.is_final:
            return
        self._switched = True
        if self.calibrator.phase is CalibrationPhase.GIVEN_UP:
            self.policy = FixedChunk()
            logger.warning("Dynamic chunking keeps fixed chunks: %s", self.calibrator.reason)
            return
        self.__dict__.pop("step_overhead", None)
        self.policy = self.make_policy(self.settings.policy)
        if self._trace is not None:
            self._trace.write_models(self.models)
        for stage, report in enumerate(self.calibrator.reports):
            logger.info(
                "Dynamic chunking latency model installed: stage %d of %d%s, policy %s: %s",
                stage,
                len(self.models),
                " (the slowest)" if stage == self._bottleneck(self.models) else "",
                self.settings.policy,
                report,
            )

    def make_policy(self, name: str) -> ChunkPolicy:
        """A policy by its name, from the installed models."""
        return FixedChunk() if name == "fixed" else self._make_policy(name, self.models)

    def _make_policy(self, name: str, models: Sequence[LatencyModel]) -> ChunkPolicy:
        budget = self.calibrator.budget
        if name == "equal-latency":
            return EqualLatency(
                models[self._bottleneck(models)],
                budget,
                smooth_factor=self.settings.smooth_factor,
                min_chunk=self.settings.min_chunk_size,
                alignment=self.alignment,
            )
        pipeline = self._pipeline(models)
        return ShortestTTFT(pipeline, budget, self.alignment, self.num_in_flight)

    @cached_property
    def step_overhead(self) -> StepOverhead:
        """Fitted when the first policy is made, and again when the model is installed."""
        depth = self.max_in_flight or self.calibrator.num_stages
        return fit_step_overhead(self.calibrator.runs, depth + self.calibrator.was_spared)

    @property
    def pipeline(self) -> Pipeline:
        """The installed models, with what the engine itself costs per step and stage."""
        return self._pipeline(self.models)

    def _pipeline(self, models: Sequence[LatencyModel]) -> Pipeline:
        stages = tuple(self.step_overhead.add_to(model) for model in models)
        return Pipeline(stages, max_in_flight=self.max_in_flight, may_spare=self.may_spare)

    def _bottleneck(self, models: Sequence[LatencyModel]) -> int:
        """The slowest stage, for a full chunk half-way into the longest context."""
        budget = self.calibrator.budget
        deepest = max(self.calibrator.max_model_len - budget, 0)
        return slowest_stage(models, deepest // 2, budget)


def _is_sample(pieces: Sequence[Piece], num_requests: int) -> bool:
    """Whether the batch tells the time of a calibration chunk."""
    return _is_alone(pieces, num_requests, ChunkReason.CALIBRATION)


def _is_alone(pieces: Sequence[Piece], num_requests: int, reason: ChunkReason) -> bool:
    """One chunk, sized for this reason, with next to nothing else in its batch."""
    if len(pieces) != 1 or pieces[0].reason is not reason:
        return False
    return num_requests - 1 <= max_other_tokens(pieces[0].num_tokens)
