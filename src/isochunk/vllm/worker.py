"""Runs on the workers: times the model call of tagged batches, and the startup sweep.

The functions here are sent with ``collective_rpc`` and get vLLM's worker as first argument.
Nothing is installed on a class: hooks sit on the model and a wrapper on the runner *instance*
(Ray's compiled graph calls the runner directly, so the worker would be too far out), and
``uninstall`` removes all of it.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from isochunk.calibration import SWEEP_REPEATS
from isochunk.timings import Timing

logger = init_logger("vllm.isochunk.worker")

TAG = "isochunk_tag"
"""Attribute of a SchedulerOutput: the number of a batch to time. Absent: no timing."""
SWEEP_TAG = -1
_ATTRIBUTE = "_isochunk_timer"
# Timings wait here until drained; a bound in case nobody drains.
_MAX_PENDING = 4096


class StageTimer:
    """Times the model call (no input staging, no PP transfer) of tagged batches.

    On accelerators with events on the stream, read only once they have completed; on CPU,
    where the call itself blocks, with the monotonic clock.
    """

    def __init__(self, runner: Any, model: nn.Module) -> None:
        self.tag: int | None = None
        self._runner = runner
        self._uses_events = torch.device(runner.device).type != "cpu"
        self._start: tuple[float, Any] | None = None
        self._pending: deque[tuple[int, float, Any, Any]] = deque(maxlen=_MAX_PENDING)
        self._handles = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]
        execute_model = runner.execute_model

        def tagged_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.tag = getattr(scheduler_output, TAG, None)
            try:
                return execute_model(scheduler_output, *args, **kwargs)
            finally:
                self.tag = None

        runner.execute_model = tagged_execute_model

    def remove(self) -> None:
        """Take the hooks and the wrapper off again."""
        for handle in self._handles:
            handle.remove()
        del self._runner.execute_model  # the class's method shows through again

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.monotonic()
        event = torch.Event(device=self._runner.device, enable_timing=True)
        event.record()
        return event

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.tag is not None:
            self._start = (time.monotonic(), self._mark())

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.tag is not None and self._start is not None:
            self._pending.append((self.tag, *self._start, self._mark()))
            self._start = None

    def drain(self) -> list[Timing]:
        """Completed timings since the last drain, oldest first. Never waits for a device."""
        done = []
        while self._pending:
            tag, start_s, start, end = self._pending[0]
            if self._uses_events and not end.query():
                break
            self._pending.popleft()
            ms = start.elapsed_time(end) if self._uses_events else (end - start) * 1e3
            done.append(Timing(tag, start_s, ms))
        return done


def install(worker: Any) -> str | None:
    """Start timing tagged batches on this worker; returns why it cannot, or None."""
    runner = worker.model_runner
    model = runner.get_model()
    if not isinstance(model, nn.Module) or type(model).__call__ is not nn.Module.__call__:
        # E.g. an outer class compiled with support_torch_compile: module hooks don't run.
        return f"the model class {type(model).__name__} bypasses forward hooks"
    if not hasattr(runner, "_dummy_run"):
        return f"the model runner {type(runner).__name__} has no _dummy_run for the startup sweep"
    setattr(runner, _ATTRIBUTE, StageTimer(runner, model))
    return None


def uninstall(worker: Any) -> None:
    """Stop timing on this worker: nothing of it is left."""
    timer = worker.model_runner.__dict__.pop(_ATTRIBUTE, None)
    if timer is not None:
        timer.remove()


def sweep(worker: Any, sizes: tuple[int, ...]) -> tuple[int, list[tuple[int, float]]]:
    """Attention-free dummy forwards: the stage, and the best ms of each size.

    One warm-up forward, then two per size. An exception is the caller's startup error. With
    TP the other ranks of the stage already wait in a collective for this one and would never
    answer, so the process ends instead; vLLM's monitor then stops the whole engine.
    """
    try:
        return get_pp_group().rank_in_group, _sweep(worker.model_runner, sizes)
    except Exception:
        if get_tp_group().world_size > 1:
            logger.exception("startup sweep failed; ending this worker so that no rank waits")
            os._exit(1)
        raise


def _sweep(runner: Any, sizes: tuple[int, ...]) -> list[tuple[int, float]]:
    timer: StageTimer = getattr(runner, _ATTRIBUTE)
    known = inspect.signature(runner._dummy_run).parameters
    wanted = {"is_profile": True, "randomize_inputs": True, "skip_attn": True}
    kwargs = {name: value for name, value in wanted.items() if name in known}
    runner._dummy_run(sizes[-1], **kwargs)
    timer.tag = SWEEP_TAG
    try:
        for size in sizes:
            for _ in range(SWEEP_REPEATS):
                runner._dummy_run(size, **kwargs)
    finally:
        timer.tag = None
    if timer._uses_events:
        torch.accelerator.synchronize()
    times = [timing.latency_ms for timing in timer.drain()]
    if len(times) != SWEEP_REPEATS * len(sizes):
        return []  # hooks didn't run (e.g. a replayed full graph)
    return [
        (size, min(times[i * SWEEP_REPEATS : (i + 1) * SWEEP_REPEATS]))
        for i, size in enumerate(sizes)
    ]


def drain(worker: Any) -> tuple[int, list[Timing]]:
    """The stage, and the timings that completed on this worker since the last call."""
    timer = getattr(worker.model_runner, _ATTRIBUTE, None)
    return get_pp_group().rank_in_group, timer.drain() if timer is not None else []
