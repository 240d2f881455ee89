"""vLLM schedulers with dynamic chunking; ``--scheduler-cls`` takes the last class here."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from isochunk import metrics
from isochunk.vllm.adapter import Adapter, attach
from isochunk.vllm.batch_queue import BatchQueue
from isochunk.vllm.internals import find_engine_core

logger = logging.getLogger(__name__)


class DynamicChunkingMixin:
    """Asks the adapter for chunk sizes and tells it what was scheduled."""

    _adapter: Adapter | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        core = find_engine_core()
        self._queue = BatchQueue(self, core)
        executor = getattr(core, "model_executor", None)
        self._adapter = attach(self, executor, self._queue.can_spare)

    def _tell(self, call: str, *args: Any, default: Any = None) -> Any:
        """Call the adapter; a fault of ours turns it off and leaves the engine running."""
        if self._adapter is None:
            return default
        try:
            return getattr(self._adapter, call)(*args)
        except Exception:
            logger.exception("Dynamic chunking failed; it is off now and chunks stay fixed")
            metrics.export_off("dynamic chunking failed; the server's log says where")
            self._adapter = None
            return default

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's Scheduler."""
        self._tell("begin_step")
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._queue.set_spare(self._tell("end_step", output, default=False))
        return output

    def has_requests(self) -> bool:
        """See vLLM's Scheduler."""
        return super().has_requests() and not self._queue.must_shrink  # type: ignore[misc]

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's Scheduler."""
        if self._adapter is not None and self._adapter.controller.may_spare:
            self._queue.make_room()
        return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # vLLM calls this for every request of a step, after the prefix-cache lookup (so that
        # num_computed_tokens is the true one) and just before it allocates KV blocks.
        clamp = super()._reserve_prefill_lookahead  # type: ignore[misc]
        allowed: int = clamp(request, num_computed_tokens, num_new_tokens)
        if allowed <= 1:
            return allowed
        wanted = self._tell("size", request, num_computed_tokens, allowed, default=allowed)
        if not 0 < wanted < allowed:
            return min(wanted, allowed)  # 0: not in this step
        return clamp(request, num_computed_tokens, wanted) or allowed

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's Scheduler."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._tell("batch_done", scheduler_output):
            self._adapter = None
        return outputs


class SyncDynamicChunkingScheduler(DynamicChunkingMixin, Scheduler):
    """Synchronous scheduling."""


class AsyncDynamicChunkingScheduler(DynamicChunkingMixin, AsyncScheduler):
    """Asynchronous scheduling."""


class DynamicChunkingScheduler:
    """What vLLM constructs: the sync or the async scheduler."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        is_async = vllm_config.scheduler_config.async_scheduling
        chosen = AsyncDynamicChunkingScheduler if is_async else SyncDynamicChunkingScheduler
        return chosen(vllm_config, *args, **kwargs)
