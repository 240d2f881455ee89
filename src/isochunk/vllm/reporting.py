"""The periodic log line and the same counts as Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache

import vllm.envs as envs
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge
from vllm.logger import init_logger

from isochunk.controller import ChunkController
from isochunk.policies import ChunkReason

logger = init_logger("vllm.isochunk")


@cache
def _metrics() -> tuple[PrometheusCounter, Gauge]:
    """Registered once per process; visible to the API server with PROMETHEUS_MULTIPROC_DIR."""
    chunks = PrometheusCounter(
        "isochunk_chunks_total", "Prefill chunks by the reason for their size.", ["reason"]
    )
    installed = Gauge(
        "isochunk_model_installed",
        "1 once the latency model is installed.",
        multiprocess_mode="max",
    )
    return chunks, installed


class ChunkReporter:
    """Logs the counts since the last report next to vLLM's engine status line."""

    def __init__(self, controller: ChunkController) -> None:
        self._controller = controller
        self._interval_s = float(envs.VLLM_LOG_STATS_INTERVAL)
        self._reported: Counter[ChunkReason] = Counter()
        self._next_s = time.monotonic() + self._interval_s
        self._exported: Counter[ChunkReason] = Counter()

    def report(self) -> None:
        """Export the counts; log them when the interval is over and there are new ones."""
        counts = self._controller.counts
        chunks, installed = _metrics()
        for reason, count in counts.items():
            if count > self._exported[reason]:
                chunks.labels(reason.value).inc(count - self._exported[reason])
                self._exported[reason] = count
        if self._controller.models:
            installed.set(1)
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._interval_s
        new = counts - self._reported
        if not new:
            return
        self._reported = counts.copy()
        logger.info(
            "Dynamic chunking since last report: %d chunks sized from the model, %d by the "
            "calibration; fixed budget for %d (no equal-latency chunk reachable), "
            "%d (other prefills present), %d (no model or asked for)",
            new[ChunkReason.MODEL],
            new[ChunkReason.CALIBRATION],
            new[ChunkReason.UNREACHABLE],
            new[ChunkReason.OTHER_PREFILLS],
            new[ChunkReason.FIXED],
        )
