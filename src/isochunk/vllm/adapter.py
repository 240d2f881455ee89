"""Between vLLM's scheduler and the engine-agnostic controller."""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.logger import init_logger

from isochunk.calibration import plan_sweep
from isochunk.config import DynamicChunkingConfig, resolve_config
from isochunk.controller import ChunkController
from isochunk.fitting import ChunkSample
from isochunk.policies import ChunkDecision, ChunkReason, FixedChunk, Prefill, Step, chunk_alignment
from isochunk.vllm import worker
from isochunk.vllm.internals import find_executor, why_unsupported
from isochunk.vllm.reporting import ChunkReporter
from isochunk.vllm.timing import Piece, TimedChunk, TimingCollector, TraceFile

logger = init_logger("vllm.isochunk")

OVERRIDE_ARG = "isochunk_fixed_chunk"
"""Request's ``vllm_xargs``: a fixed chunk size [tokens] for it, 0 = the whole budget."""


def attach(scheduler: Any) -> Adapter | None:
    """Set up dynamic chunking for a freshly built vLLM scheduler.

    Returns:
        None, after one warning that says why, where fixed chunking has to stay.

    Raises:
        ConfigError: the feature is on and a setting is invalid.
        RuntimeError: a forward of the startup sweep raised on a worker.
    """
    vllm_config = scheduler.vllm_config
    settings = resolve_config(vllm_config.additional_config, os.environ)
    if not settings.enabled:
        return None
    # The core logs through the standard library; show it where vLLM's lines go.
    core_logger = logging.getLogger("isochunk")
    core_logger.handlers = logging.getLogger("vllm").handlers
    core_logger.setLevel(logging.INFO)
    core_logger.propagate = False
    reason = why_unsupported(scheduler, settings)
    if reason is None:
        executor = find_executor(scheduler)
        reason = next((why for why in executor.collective_rpc(worker.install) if why), None)
    if reason is not None:
        logger.warning("Dynamic chunking is off, chunks stay fixed: %s", reason)
        return None
    return Adapter(scheduler, settings, executor)


class Adapter:
    """Translates steps, requests and timings; holds no chunking logic of its own."""

    def __init__(self, scheduler: Any, settings: DynamicChunkingConfig, executor: Any) -> None:
        parallel = scheduler.vllm_config.parallel_config
        budget = scheduler.max_num_scheduled_tokens
        alignment = chunk_alignment(scheduler.block_size)
        self._scheduler = scheduler
        self._executor = executor
        self._settings = settings
        self._trace = TraceFile(settings.trace_file) if settings.trace_file else None
        self._collector: TimingCollector | None = TimingCollector(executor)
        self._in_flight = 0
        self._decisions: dict[str, tuple[Prefill, ChunkDecision]] = {}
        self.controller = ChunkController(
            settings,
            max_num_batched_tokens=budget,
            alignment=alignment,
            num_stages=parallel.pipeline_parallel_size,
            max_model_len=scheduler.max_model_len,
        )
        self._reporter = ChunkReporter(self.controller)
        if not self.controller.is_fixed_for_good:
            self._run_sweep(plan_sweep(budget, alignment))
        self._stop_timing_if_done()

    def _run_sweep(self, sizes: tuple[int, ...]) -> None:
        slowest: dict[int, dict[int, float]] = {}  # stage -> size -> ms of its slowest TP rank
        for stage, timings in self._executor.collective_rpc(worker.sweep, args=(sizes,)):
            times = slowest.setdefault(stage, {})
            for size, ms in timings:
                times[size] = max(ms, times.get(size, 0.0))
        for stage, times in sorted(slowest.items()):
            self.controller.add_sweep(stage, list(times.items()))

    # -- one scheduler step ----------------------------------------------------------------

    def begin_step(self) -> None:
        """Before vLLM schedules: take timings in, tell the policy what is there."""
        if self._collector is not None:
            self._absorb(self._collector.poll())
        self.controller.begin_step(Step(self._prefills()))

    def _prefills(self) -> list[Prefill]:
        """Running and startable waiting requests with prompt tokens to compute, in order.

        A decode has at most one token to compute. Requests that cannot start yet (waiting for
        remote KV, a grammar, …) are in ``deferred_waiting``.
        """
        s = self._scheduler
        prefills = [
            Prefill(r.request_id, r.num_computed_tokens, r.num_tokens - r.num_computed_tokens)
            for r in s.running
            if r.num_tokens - r.num_computed_tokens > 1
        ]
        for queue in (s.kv_holding_waiting, s.waiting):
            prefills += [
                Prefill(r.request_id, r.num_computed_tokens, r.num_tokens - r.num_computed_tokens)
                for r in queue
                if r not in s.deferred_waiting
            ]
        return prefills

    def size(self, request: Any, num_computed: int, num_allowed: int) -> int:
        """Tokens for this request in this step; decodes get what vLLM allows."""
        remaining = request.num_tokens - num_computed
        if remaining <= 1:
            return num_allowed
        prefill = Prefill(request.request_id, num_computed, remaining)
        num_allowed = min(num_allowed, remaining)
        fixed = self._fixed_size(request)
        if fixed is not None:
            decision = fixed.size(prefill, num_allowed)
        else:
            decision = self.controller.size(prefill, num_allowed)
        self._decisions[request.request_id] = (prefill, decision)
        return decision.num_tokens

    def _fixed_size(self, request: Any) -> FixedChunk | None:
        """Fixed chunks for requests with multimodal inputs, or that ask for them."""
        if request.has_encoder_inputs:  # may have to go in one forward
            return FixedChunk()
        if not self._settings.allow_request_override or request.sampling_params is None:
            return None
        asked = (request.sampling_params.extra_args or {}).get(OVERRIDE_ARG)
        if not isinstance(asked, int | float) or asked < 0:
            return None
        return FixedChunk(int(asked) or None)

    def end_step(self, output: Any) -> None:
        """After vLLM has scheduled: count what went out, tag what is to be timed."""
        scheduled = output.num_scheduled_tokens
        pieces = tuple(
            Piece(prefill, scheduled[request_id], decision.reason)
            for request_id, (prefill, decision) in self._decisions.items()
            if request_id in scheduled
        )
        for piece in pieces:
            self.controller.scheduled(self._decisions[piece.prefill.request_id][1])
        self._decisions.clear()
        if output.total_num_scheduled_tokens > 0:
            self._in_flight += 1
        if self._collector is not None and pieces:
            # Only a batch with nothing else in it tells the time of its chunk.
            is_sample = len(scheduled) == 1 and pieces[0].reason is ChunkReason.CALIBRATION
            if self._trace is not None or (is_sample and self.controller.needs_timing):
                self._collector.tag(output, pieces)
        self._reporter.report()

    def batch_done(self, output: Any) -> None:
        """A batch's output is back from the last stage."""
        if output.total_num_scheduled_tokens > 0:
            self._in_flight -= 1
        if self._collector is not None:
            self._collector.batch_done(output)
            if self._in_flight == 0:
                self._absorb(self._collector.flush())

    # -- timings ---------------------------------------------------------------------------

    def _absorb(self, chunks: list[TimedChunk]) -> None:
        if not chunks:
            return
        controller = self.controller
        for chunk in chunks:
            first = chunk.pieces[0]
            if first.reason is ChunkReason.CALIBRATION and len(chunk.pieces) == 1:
                sample = ChunkSample(first.prefill.num_cached, first.num_tokens, chunk.latency_ms)
                controller.add_sample(chunk.stage, sample)
            if self._trace is not None:
                models = controller.models
                self._trace.write(
                    chunk,
                    models[chunk.stage].predict_ms(first.prefill.num_cached, first.num_tokens)
                    if models and len(chunk.pieces) == 1
                    else None,
                )
        if self._collector is not None and self._collector.is_empty:
            controller.prefill_drained()
            self._stop_timing_if_done()

    def _stop_timing_if_done(self) -> None:
        """Installed or given up: take everything off the workers, unless a trace wants it."""
        if not self.controller.needs_timing and self._trace is None:
            self._collector = None
            self._executor.collective_rpc(worker.uninstall, non_block=True)
