"""Reasons to keep fixed chunking that no engine here can be brought into."""

from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.config import DynamicChunkingConfig
from isochunk.vllm.internals import find_engine_core, why_unsupported


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


def test_engine_core_is_found_as_the_caller_that_holds_an_executor() -> None:
    class Core:
        def __init__(self) -> None:
            self.model_executor = SimpleNamespace(collective_rpc=print)
            self.found = find_engine_core()

    core = Core()
    assert core.found is core
    assert find_engine_core() is None
