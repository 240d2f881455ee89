"""One batch more in flight than stages: no stage waits for the scheduler between chunks.

With a batch per stage in flight, the first stage idles from the end of its chunk until the last
stage's result is back and the next batch has arrived. Growing fixed chunks hide that; chunks of
equal time pay it every step. Asynchronous scheduling with the V2 runner queues one batch more;
for synchronous scheduling vLLM has no setting, so this replaces the engine core's empty queue.
"""

from collections import deque
from typing import Any


def can_deepen(engine: Any, scheduler: Any) -> bool:
    """Whether the queue is the one we know and nothing sizes buffers by its length.

    (Sliding-window caches and auxiliary outputs do.)
    """
    config = scheduler.vllm_config
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    return (
        config.max_concurrent_batches == config.parallel_config.pipeline_parallel_size
        and getattr(scheduler, "aux_output_connector", None) is None
        and {type(spec).__name__ for spec in specs} <= {"FullAttentionSpec", "MLAAttentionSpec"}
        and all(getattr(spec, "sliding_window", None) is None for spec in specs)
        and hasattr(engine, "step_with_batch_queue")
    )


def set_depth(engine: Any, depth: int) -> None:
    """So many batches in flight from now on; between steps, and only while none is."""
    queue = getattr(engine, "batch_queue", None)
    if isinstance(queue, deque) and not queue and queue.maxlen == engine.batch_queue_size != depth:
        engine.batch_queue, engine.batch_queue_size = deque(maxlen=depth), depth
