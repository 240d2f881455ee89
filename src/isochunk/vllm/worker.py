"""Runs on the workers: times the model call of tagged batches, and the startup sweep.

Sent with ``collective_rpc``; each function gets vLLM's worker as first argument. Hooks sit on
the model, and a wrapper on the runner *instance* (Ray's compiled graph calls the runner
directly, so the worker would be too far out). ``uninstall`` removes all of it.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from isochunk.probes import SWEEP_REPEATS
from isochunk.stage_timer import DeviceClock, HostClock, StageTimer
from isochunk.timings import Timing

logger = init_logger("vllm.isochunk.worker")

TAG = "isochunk_tag"
"""Attribute of a SchedulerOutput: the number of a batch to time. Absent: no timing."""
_TIMER = "_isochunk_timer"


def install(worker: Any) -> str | None:
    """Start timing tagged batches on this worker; returns why it cannot, or None."""
    runner = worker.model_runner
    model = runner.get_model()
    is_plain = isinstance(model, nn.Module) and type(model).__call__ is nn.Module.__call__
    if not is_plain or getattr(model, "_compiled_call_impl", None) is not None:
        # E.g. an outer class compiled with support_torch_compile: module hooks don't run.
        return f"the model class {type(model).__name__} bypasses forward hooks"
    if not hasattr(runner, "_dummy_run"):
        return f"the model runner {type(runner).__name__} has no _dummy_run for the startup sweep"
    make_event = partial(torch.Event, enable_timing=True)
    on_cpu = torch.device(runner.device).type == "cpu"
    clock = HostClock() if on_cpu else DeviceClock(make_event, torch.accelerator.synchronize)
    timer = StageTimer(model, clock)
    execute_model = runner.execute_model

    def tagged_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        before = timer.tag  # the sweep's, where a dummy run comes through here (V2 runner)
        timer.tag = getattr(scheduler_output, TAG, before)
        try:
            return execute_model(scheduler_output, *args, **kwargs)
        finally:
            timer.tag = before

    runner.execute_model = tagged_execute_model
    setattr(runner, _TIMER, timer)
    return None


def uninstall(worker: Any) -> None:
    """Stop timing on this worker: nothing of it is left."""
    timer = worker.model_runner.__dict__.pop(_TIMER, None)
    if timer is not None:
        timer.remove()
        del worker.model_runner.execute_model  # the class's method shows through again


def sweep(worker: Any, sizes: tuple[int, ...]) -> tuple[int, list[tuple[int, float]]]:
    """Attention-free dummy forwards: the stage, and the best ms of each size.

    An exception is the caller's startup error. With TP, the stage's other ranks wait for this
    one in a collective, so the process ends instead and vLLM's monitor stops the engine.
    """
    try:
        return get_pp_group().rank_in_group, _sweep(worker.model_runner, sizes)
    except Exception:
        if get_tp_group().world_size > 1:
            logger.exception("startup sweep failed; ending this worker so that no rank waits")
            os._exit(1)
        raise


def _sweep(runner: Any, sizes: tuple[int, ...]) -> list[tuple[int, float]]:
    timer: StageTimer = getattr(runner, _TIMER)
    _dummy_forward(runner, sizes[-1])
    timings = []
    for size in sizes:
        timer.tag = size
        for _ in range(SWEEP_REPEATS):
            _dummy_forward(runner, size)
        timer.tag = None
        timer.clock.wait()
        times = [timing.latency_ms for timing in timer.drain()]
        if times:  # none if hooks don't run (a replayed full graph)
            timings.append((size, min(times)))
    return timings


def _dummy_forward(runner: Any, num_tokens: int) -> None:
    wanted = {"is_profile": True, "randomize_inputs": True, "skip_attn": True}
    known = inspect.signature(runner._dummy_run).parameters  # differs between V1 and V2
    runner._dummy_run(num_tokens, **{k: v for k, v in wanted.items() if k in known})


def warm_up(worker: Any) -> None:
    """One small dummy forward."""
    _dummy_forward(worker.model_runner, 1)


def drain(worker: Any) -> tuple[int, list[Timing]]:
    """The stage, and the timings that finished on this worker since the last call."""
    timer = getattr(worker.model_runner, _TIMER, None)
    return get_pp_group().rank_in_group, timer.drain() if timer is not None else []
