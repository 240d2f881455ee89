"""The chunk counts as Prometheus metrics of the process that schedules.

Where another process serves ``/metrics`` (vLLM's API server), they reach it if
PROMETHEUS_MULTIPROC_DIR was set before launch, as ``isochunk serve`` does.
"""

from __future__ import annotations

from collections import Counter

import prometheus_client

from isochunk.policies import ChunkReason

CHUNKS = prometheus_client.Counter(
    "isochunk_chunks", "Prefill chunks by the reason for their size.", ["reason"]
)
INSTALLED = prometheus_client.Gauge(
    "isochunk_model_installed", "1 once the model is installed.", multiprocess_mode="max"
)


def export(new: Counter[ChunkReason]) -> None:
    """Add chunks to the counters."""
    for reason, count in new.items():
        CHUNKS.labels(reason.value).inc(count)
