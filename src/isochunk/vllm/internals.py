"""What the adapter needs of vLLM beyond its public interface, all in one place.

Nothing of vLLM is replaced or copied; ``tests/engine/test_contract.py`` pins expectations.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.platforms import current_platform

from isochunk.config import DynamicChunkingConfig
from isochunk.vllm import worker

SCHEDULER_NAMES = ("_reserve_prefill_lookahead", "kv_holding_waiting", "deferred_waiting")
NEEDS_CALIBRATION = (
    "need_timing=false leaves only the attention-free startup sweep, which does not identify the "
    "attention term; it needs true"
)


def why_unsupported(scheduler: Any, settings: DynamicChunkingConfig, executor: Any) -> str | None:
    """Why this engine has to keep fixed chunking, or None."""
    config = scheduler.vllm_config
    pp = config.parallel_config.pipeline_parallel_size
    role = getattr(config.kv_transfer_config, "kv_role", None)
    budget = scheduler.max_num_scheduled_tokens
    missing = [name for name in SCHEDULER_NAMES if not hasattr(scheduler, name)]
    is_ray_v1 = type(executor).__name__ == "RayDistributedExecutor"
    is_hybrid = getattr(scheduler, "need_mamba_block_aligned_split", False)
    chunked = config.scheduler_config.enable_chunked_prefill
    checks = (
        (missing, f"this vLLM release's scheduler has no {', '.join(missing)}"),
        (executor is None, "this vLLM release builds its scheduler where no executor is found"),
        (is_ray_v1, "RayDistributedExecutor returns no timings; use Ray's V2 executor backend"),
        (pp == 1, "pipeline_parallel_size=1 has no pipeline to keep full; it needs > 1"),
        (not chunked, "enable_chunked_prefill=False leaves no chunks to size; it needs True"),
        (role == "kv_consumer", "kv_role=kv_consumer is a decode instance without prefills"),
        (is_hybrid, "this model's state cache dictates where chunks end (hybrid/Mamba model)"),
        (settings.is_min_chunk_too_large(budget), settings.explain_min_chunk(budget)),
        (not settings.runtime_calibration, NEEDS_CALIBRATION),
    )
    return next((why for failed, why in checks if failed), None)


def find_engine_core() -> Any:
    """The engine core that is constructing a scheduler right now.

    vLLM gives the scheduler no reference to it, but EngineCore sets ``self.model_executor``
    before it builds the scheduler: walk up the call stack to that ``self``. None if no caller
    has one, i.e. if this vLLM release builds its scheduler differently.
    """
    frame = sys._getframe(1)
    while frame is not None:
        core = frame.f_locals.get("self")
        if hasattr(getattr(core, "model_executor", None), "collective_rpc"):
            return core
        frame = frame.f_back  # type: ignore[assignment]
    return None


def warm_up_cpu_pipeline(scheduler: Any, executor: Any) -> None:
    """One dummy forward per rank of a CPU pipeline that has no startup sweep.

    In eager mode vLLM 0.32's CPU worker runs none, so PP ranks > 0 have no receive buffers and
    die on ``assert self.intermediate_tensors is not None`` at the first request.
    """
    pp = scheduler.vllm_config.parallel_config.pipeline_parallel_size
    if executor is not None and current_platform.is_cpu() and pp > 1:
        executor.collective_rpc(worker.warm_up)
