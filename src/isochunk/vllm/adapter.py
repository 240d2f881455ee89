"""Between vLLM's scheduler and the engine-agnostic controller."""

from __future__ import annotations

import logging
import os
import time
from itertools import chain, islice
from typing import Any

from vllm import envs
from vllm.v1.core.sched.interface import PauseState

from isochunk import metrics
from isochunk.config import OVERRIDE_ARG, DynamicChunkingConfig, resolve_config
from isochunk.controller import ChunkController
from isochunk.log_output import log_like
from isochunk.policies import FixedChunk, Prefill, Step, chunk_alignment
from isochunk.probes import plan_sweep
from isochunk.reporting import ChunkReporter
from isochunk.timings import TimingFetcher
from isochunk.vllm import worker
from isochunk.vllm.internals import warm_up_cpu_pipeline, why_unsupported

logger = logging.getLogger(__name__)

MAX_LISTED_WAITING = 32


def attach(scheduler: Any, executor: Any, can_spare: bool) -> Adapter | None:
    """Set up dynamic chunking for a freshly built vLLM scheduler.

    Returns None, after one warning that says why, where fixed chunking has to stay. Raises
    ConfigError for an invalid setting, RuntimeError if a sweep forward raised on a worker.
    """
    settings = resolve_config(scheduler.vllm_config.additional_config, os.environ)
    log_like("vllm")
    if settings.enabled:
        reason = why_unsupported(scheduler, settings, executor)
        if reason is None:
            reason = next(filter(None, executor.collective_rpc(worker.install)), None)
            if reason is None:
                adapter = Adapter(scheduler, settings, executor, can_spare)
                return None if adapter.is_done else adapter
            executor.collective_rpc(worker.uninstall)
        logger.warning("Dynamic chunking is off, chunks stay fixed: %s", reason)
        metrics.export_off(reason)
    warm_up_cpu_pipeline(scheduler, executor)
    return None


class Adapter:
    """Translates steps, requests and timings; holds no chunking logic of its own."""

    def __init__(
        self, scheduler: Any, settings: DynamicChunkingConfig, executor: Any, can_spare: bool
    ) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._overridable = settings.allow_request_override
        self._is_timing = True
        config, budget = scheduler.vllm_config, scheduler.max_num_scheduled_tokens
        tp = config.parallel_config.tensor_parallel_size
        alignment = chunk_alignment(scheduler.block_size)
        self.controller = ChunkController(
            settings,
            max_num_batched_tokens=budget,
            alignment=alignment,
            num_stages=config.parallel_config.pipeline_parallel_size,
            max_model_len=scheduler.max_model_len,
            max_in_flight=getattr(config, "max_concurrent_batches", 0),
            can_spare=can_spare and settings.spare_batch,
        )
        self._metrics = metrics.CalibrationExporter(
            self.controller, config.device_config.device_type, tp
        )
        self._fetcher = TimingFetcher(
            self.controller.ledger,
            lambda: executor.collective_rpc(worker.drain, non_block=True),
            self.controller.settle,
        )
        self._reporter = ChunkReporter(
            self.controller.counts, envs.VLLM_LOG_STATS_INTERVAL, time.monotonic, metrics.export
        )
        if not self.controller.calibrator.is_final:
            sizes = plan_sweep(budget, alignment)
            self.controller.add_sweep(executor.collective_rpc(worker.sweep, args=(sizes,)))
        else:
            warm_up_cpu_pipeline(scheduler, executor)
        self._stop_timing_if_done()

    @property
    def is_done(self) -> bool:
        """Whether chunks stay fixed and nothing is timed any more."""
        return self.controller.is_fixed_for_good and not self.controller.needs_timing

    def begin_step(self) -> None:
        """Before vLLM schedules: take timings in, tell the policy what is there."""
        self._fetcher.poll()
        s = self._scheduler
        # A decode has at most one prompt or output token to compute (and its drafts).
        sources = [r for r in s.running if r.num_tokens - r.num_computed_tokens > 1]
        num_running = len(sources)
        pending = (
            r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens
            for r in s.running
            if r.num_tokens - r.num_computed_tokens <= 1
        )
        num_decode_tokens = sum(max(num_tokens, 0) for num_tokens in pending)
        num_waiting = 0
        if len(s.running) < s.max_num_active_reqs and s.pause_state == PauseState.UNPAUSED:
            # Those that cannot start yet (remote KV, a grammar, …) are in deferred_waiting.
            num_waiting = s.get_request_counts()[1] - len(s.deferred_waiting)
            queued = chain(s.kv_holding_waiting, s.waiting)
            ready = (r for r in queued if r not in s.deferred_waiting)
            sources += islice(ready, min(max(num_waiting, 0), MAX_LISTED_WAITING))
        prefills = [
            Prefill(r.request_id, r.num_computed_tokens, r.num_tokens - r.num_computed_tokens)
            for r in sources
        ]
        num_unlisted = max(num_waiting - (len(prefills) - num_running), 0)
        others = len(s.running) - num_running
        step = Step(prefills, num_decode_tokens, num_running, num_unlisted, others)
        self.controller.begin_step(step)

    def size(self, request: Any, num_computed: int, num_allowed: int) -> int:
        """Tokens for this request in this step; decodes get what vLLM allows."""
        remaining = request.num_tokens - num_computed
        if remaining <= 1:
            return num_allowed
        prefill = Prefill(request.request_id, num_computed, remaining)
        override = None
        if request.has_encoder_inputs:  # multimodal: may have to go in one forward
            override = FixedChunk()
        elif self._overridable and request.sampling_params is not None:
            asked = (request.sampling_params.extra_args or {}).get(OVERRIDE_ARG)
            if type(asked) is int and asked >= 0:
                override = FixedChunk(asked or None)
        return self.controller.size(prefill, min(num_allowed, remaining), override)

    def end_step(self, output: Any) -> bool:
        """Count what vLLM has scheduled, tag what is to be timed; returns ``wants_spare_batch``."""
        tag = self.controller.end_step(output.num_scheduled_tokens)
        if tag is not None:
            setattr(output, worker.TAG, tag)
        self._reporter.report()
        return self.controller.wants_spare_batch

    def batch_done(self, output: Any) -> bool:
        """A batch's output is back from the last stage; returns ``is_done``."""
        if output.total_num_scheduled_tokens > 0:
            self.controller.batch_done(getattr(output, worker.TAG, None))
        if self.controller.num_in_flight == 0:
            self._fetcher.flush()
        self._stop_timing_if_done()
        return self.is_done

    def _stop_timing_if_done(self) -> None:
        """Installed or given up: take everything off the workers, once."""
        if self._is_timing:
            self._metrics.export()
            self._is_timing = self.controller.needs_timing
            if not self._is_timing:
                self._executor.collective_rpc(worker.uninstall, non_block=True)
