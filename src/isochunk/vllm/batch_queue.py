"""The one patch: a batch more in flight while a prefill is alone, see ``wants_spare_batch``.

Two attributes of EngineCore change (``batch_queue``, ``batch_queue_size``) and one of its result
queues (``busy_loop_s``); nothing is replaced or copied. Without them, or where another depth could
matter, all stays as vLLM has it. With decodes around the usual depth holds: one more would split
them into more groups.

The engine core awaits results by spinning for a second, to notice them at once. That takes time
from the stages where they have all cores, and a spare batch makes a late notice harmless: so while
there is one, it sleeps sooner until vLLM's notification.

CPUs only. On accelerators the runners copy a step's inputs from host buffers that they reuse,
and what keeps a step from overwriting those of one that hasn't read them is how few are in
flight (V1 without async scheduling: one pinned buffer; V2: as many as vLLM's own depth). V2
with async scheduling keeps P + 1 in flight by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any

# Caches whose memory isn't reserved by the usual number of batches in flight, as that of
# sliding windows is.
KV_CACHES = {"FullAttentionSpec", "MLAAttentionSpec"}
# Each batch brings two messages, and vLLM's socket drops the notification of one that follows
# another within 1.5 ms: spin for longer than that after each.
SPIN_S = 0.01


class BatchQueue:
    """EngineCore's queue of batches in flight, with room for one more while that is wanted.

    EngineCore schedules while its queue has room, for P batches, and asserts before each step
    that it isn't full. So the room changes only while a step schedules; and before it shrinks,
    vLLM has to take a batch out and put none in, as it does if the scheduler has no requests.
    """

    def __init__(self, scheduler: Any, core: Any) -> None:
        config = scheduler.vllm_config
        self._core, self._is_wide, self._wants_spare = core, False, False
        self._num_usual = config.parallel_config.pipeline_parallel_size
        self._spins: list[tuple[Any, float]] = []
        groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
        specs = {type(group.kv_cache_spec).__name__ for group in groups}
        self.can_spare = (
            core is not None
            and config.device_config.device_type == "cpu"
            and getattr(config, "max_concurrent_batches", 0) == self._num_usual > 1
            # Ranks of a data-parallel engine step together.
            and getattr(config.parallel_config, "data_parallel_size", 2) == 1
            and getattr(config, "speculative_config", core) is None
            and bool(specs)
            and specs <= KV_CACHES
            and not getattr(getattr(config, "aux_output_config", None), "enabled", False)
        )

    def make_room(self) -> None:
        """Replace the queue by one for one more, once; not in a step, which holds on to it."""
        queue = getattr(self._core, "batch_queue", None)
        size = getattr(self._core, "batch_queue_size", 0)
        if not self._is_wide and queue is not None and queue.maxlen == self._num_usual == size:
            self._core.batch_queue = deque(queue, maxlen=self._num_usual + 1)
            self._is_wide = True
            queues = getattr(self._core.model_executor, "response_mqs", ())
            waits: list[Any] = [getattr(queue, "_spin_condition", None) for queue in queues]
            self._spins = [(w, w.busy_loop_s) for w in waits if hasattr(w, "busy_loop_s")]

    def set_spare(self, is_wanted: bool) -> None:
        """While a step schedules: whether one batch more is to be in flight from now on."""
        self._wants_spare = is_wanted
        for wait, busy_loop_s in self._spins:
            wait.busy_loop_s = min(SPIN_S, busy_loop_s) if is_wanted else busy_loop_s
        if self._is_wide and (is_wanted or len(self._core.batch_queue) < self._num_usual):
            self._core.batch_queue_size = self._num_usual + is_wanted

    @property
    def must_shrink(self) -> bool:
        """Whether the next step must not schedule."""
        return (
            self._is_wide
            and not self._wants_spare
            and self._core.batch_queue_size > self._num_usual <= len(self._core.batch_queue)
        )
