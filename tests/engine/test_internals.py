"""Reasons to keep fixed chunking that no engine here can be brought into."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.config import DynamicChunkingConfig
from isochunk.vllm.internals import find_engine_core, why_unsupported
from isochunk.vllm.queue_depth import can_deepen, set_depth


def scheduler(**changes: Any) -> SimpleNamespace:
    values = {"pp": 2, "chunked": True, "role": None, "hybrid": False, "hook": True} | changes
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=values["pp"]),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=values["chunked"]),
            kv_transfer_config=SimpleNamespace(kv_role=values["role"]) if values["role"] else None,
        ),
        need_mamba_block_aligned_split=values["hybrid"],
        max_num_scheduled_tokens=8192,
        kv_holding_waiting=[],
        deferred_waiting=set(),
    )
    if values["hook"]:
        made._reserve_prefill_lookahead = None
    return made


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"pp": 1}, {}, "pipeline_parallel_size=1"),
        ({"chunked": False}, {}, "enable_chunked_prefill=False"),
        ({"role": "kv_consumer"}, {}, "kv_role=kv_consumer"),
        ({"hybrid": True}, {}, "hybrid/Mamba"),
        ({"hook": False}, {}, "has no _reserve_prefill_lookahead"),
        ({}, {"runtime_calibration": False}, "need_timing=false"),
        (
            {},
            {"policy": "equal-latency", "min_chunk_size": 8192},
            "min_chunk_size=8192 is not below max_num_batched_tokens=8192",
        ),
    ],
)
def test_reason(changes: dict, settings: dict, reason: str) -> None:
    config = DynamicChunkingConfig(enabled=True, **settings)
    found = why_unsupported(scheduler(**changes), config, executor=object())
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("role", [None, "kv_producer", "kv_both"])
def test_prefill_roles_are_supported(role: str | None) -> None:
    config = DynamicChunkingConfig(enabled=True)
    assert why_unsupported(scheduler(role=role), config, executor=object()) is None
    # The minimum chunk is a setting of the equal-latency rule; auto has none.
    large = DynamicChunkingConfig(enabled=True, min_chunk_size=9000)
    assert why_unsupported(scheduler(role=role), large, executor=object()) is None


def test_executors_that_cannot_be_used() -> None:
    config = DynamicChunkingConfig(enabled=True)
    ray_v1 = type("RayDistributedExecutor", (), {})()
    assert "Ray" in str(why_unsupported(scheduler(), config, ray_v1))
    assert "no executor" in str(why_unsupported(scheduler(), config, None))


def test_engine_core_is_found_from_the_caller_that_builds_the_scheduler() -> None:
    class Core:
        def __init__(self, executor: object) -> None:
            self.model_executor = executor
            self.found = find_engine_core()

    core = Core(SimpleNamespace(collective_rpc=print))
    assert core.found is core
    assert find_engine_core() is None


def test_the_queue_is_deepened_only_while_it_is_empty_and_known() -> None:
    engine = SimpleNamespace(batch_queue=deque(maxlen=2), batch_queue_size=2)
    engine.batch_queue.append("batch")
    for queue in (engine.batch_queue, None, []):
        engine.batch_queue = queue
        set_depth(engine, 3)
        assert engine.batch_queue is queue
        assert engine.batch_queue_size == 2
    engine.batch_queue = deque(maxlen=2)
    set_depth(engine, 3)
    assert (engine.batch_queue.maxlen, engine.batch_queue_size) == (3, 3)
    set_depth(engine, 2)
    assert (engine.batch_queue.maxlen, engine.batch_queue_size) == (2, 2)


@pytest.mark.parametrize(
    ("spec", "batches", "expected"),
    [
        ("FullAttentionSpec", 2, True),
        ("MLAAttentionSpec", 2, True),
        ("SlidingWindowSpec", 2, False),
        ("FullAttentionSpec", 3, False),  # asynchronous scheduling has its own
    ],
)
def test_where_one_batch_more_may_be_in_flight(spec: str, batches: int, expected: bool) -> None:
    group = SimpleNamespace(kv_cache_spec=type(spec, (), {})())
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(
            max_concurrent_batches=batches,
            parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
    )
    assert can_deepen(SimpleNamespace(step_with_batch_queue=print), made) is expected
    assert not can_deepen(SimpleNamespace(), made)
