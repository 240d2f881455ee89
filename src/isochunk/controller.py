"""What an engine talks to: sizes chunks, takes timings in, switches policy, counts.

An engine adapter needs five calls: ``begin_step`` and ``size`` while it schedules,
``scheduled`` for each chunk that went out, ``add_sample`` and ``prefill_drained`` for
timings that came back. Everything else (window, probes, fit, installation, reasons) happens
here, without engine, clock or thread.
"""

from __future__ import annotations

import logging
from collections import Counter

from isochunk.calibration import CalibrationPhase, Calibrator, slowest_stage
from isochunk.config import DynamicChunkingConfig
from isochunk.fitting import ChunkSample
from isochunk.latency import LatencyModel
from isochunk.policies import (
    ChunkDecision,
    ChunkPolicy,
    ChunkReason,
    EqualLatency,
    FixedChunk,
    Prefill,
    Step,
)

logger = logging.getLogger(__name__)


class ChunkController:
    """Owns the calibrator and the policy in force.

    Args:
        settings: smoothing factor, minimum chunk, calibration limits.
        max_num_batched_tokens: the step's token budget, and the initial chunk.
        alignment: of chunk ends [tokens].
        num_stages: pipeline stages.
        max_model_len: longest context [tokens].
    """

    def __init__(
        self,
        settings: DynamicChunkingConfig,
        *,
        max_num_batched_tokens: int,
        alignment: int,
        num_stages: int,
        max_model_len: int,
    ) -> None:
        self.settings = settings
        self.alignment = alignment
        self.calibrator = Calibrator(
            budget=max_num_batched_tokens,
            min_chunk=settings.min_chunk_size,
            alignment=alignment,
            num_stages=num_stages,
            max_model_len=max_model_len,
            max_samples=settings.max_calibration_samples,
        )
        self.policy: ChunkPolicy = self.calibrator
        self.counts: Counter[ChunkReason] = Counter()
        self.bottleneck = 0
        self._switched = False
        self._switch_if_final()

    @property
    def needs_timing(self) -> bool:
        """Whether chunk timings are still wanted."""
        return self.calibrator.phase is CalibrationPhase.PROBING

    @property
    def models(self) -> list[LatencyModel]:
        """Installed models by stage; empty before."""
        return self.calibrator.models

    @property
    def is_fixed_for_good(self) -> bool:
        """Whether every chunk from now on keeps the fixed budget."""
        return self.calibrator.phase is CalibrationPhase.GIVEN_UP

    def give_up(self, reason: str) -> None:
        """Keep fixed chunking from now on."""
        self.calibrator.give_up(reason)
        self._switch_if_final()

    def add_sweep(self, stage: int, timings: list[tuple[int, float]]) -> None:
        """Startup sweep of a stage: ``(num_tokens, ms)`` without attention."""
        self.calibrator.add_sweep(stage, timings)
        self._switch_if_final()

    def begin_step(self, step: Step) -> None:
        """Once per scheduler step, before any ``size``."""
        self.policy.begin_step(step)

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        """Tokens for this prefill in this step, and why. Always in ``1..num_allowed``."""
        return self.policy.size(prefill, num_allowed)

    def scheduled(self, decision: ChunkDecision) -> None:
        """A sized chunk really went out (an engine may drop or retry one it has sized)."""
        self.counts[decision.reason] += 1
        if decision.reason is ChunkReason.CALIBRATION:
            self.calibrator.probe_scheduled()

    def add_sample(self, stage: int, sample: ChunkSample) -> None:
        """Timing of a calibration chunk on a stage."""
        self.calibrator.add_sample(stage, sample)

    def prefill_drained(self) -> None:
        """All timings of the chunks so far are in: try to fit."""
        self.calibrator.finish_prefill()
        self._switch_if_final()

    def _switch_if_final(self) -> None:
        """Install the policy that stays, once, and say so."""
        if self._switched or not self.calibrator.is_final:
            return
        self._switched = True
        if self.calibrator.phase is CalibrationPhase.GIVEN_UP:
            self.policy = FixedChunk()
            logger.warning("Dynamic chunking keeps fixed chunks: %s", self.calibrator.reason)
            return
        budget = self.calibrator.budget
        models = self.calibrator.models
        deepest = max(self.calibrator.max_model_len - budget, 0)
        self.bottleneck = slowest_stage(models, deepest // 2, budget)
        self.policy = EqualLatency(
            models[self.bottleneck],
            budget,
            smooth_factor=self.settings.smooth_factor,
            min_chunk=self.settings.min_chunk_size,
            alignment=self.alignment,
        )
        for stage, report in enumerate(self.calibrator.reports):
            logger.info(
                "Dynamic chunking latency model installed%s: stage %d of %d: %s",
                " (slowest stage, sizes the chunks)" if stage == self.bottleneck else "",
                stage,
                len(models),
                report,
            )
