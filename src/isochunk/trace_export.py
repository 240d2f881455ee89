"""A simulated timeline as a Chrome trace (chrome://tracing, https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isochunk.timeline import Batch, Timeline

STAGES_PID, REQUESTS_PID = 0, 1


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Trace Event Format: a track for each stage with its batches, and one for each request.

    Times are in µs, as the format wants; a request's slice goes from its arrival to its first
    token.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", STAGES_PID, 0, "pipeline stages"),
        _name("process_name", REQUESTS_PID, 0, "requests (arrival to first token)"),
    ]
    for stage in range(timeline.pipeline.num_stages):
        events.append(_name("thread_name", STAGES_PID, stage, f"stage {stage}"))
    for batch in timeline.batches:
        for stage, span in enumerate(batch.spans):
            events.append(
                {
                    "name": f"step {batch.index}",
                    "ph": "X",
                    "pid": STAGES_PID,
                    "tid": stage,
                    "ts": 1000.0 * span.start_ms,
                    "dur": 1000.0 * (span.end_ms - span.start_ms),
                    "args": _describe(batch),
                }
            )
    for result in timeline.requests:
        events.append(
            {
                "name": f"request {result.index}: {result.request.num_prompt} tokens",
                "ph": "X",
                "pid": REQUESTS_PID,
                "tid": result.index,
                "ts": 1000.0 * result.arrival_ms,
                "dur": 1000.0 * result.ttft_ms,
                "args": result.request._asdict(),
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write :func:`chrome_trace` as JSON."""
    path.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _describe(batch: Batch) -> dict[str, Any]:
    prefills = [piece for piece in batch.pieces if not piece.is_decode]
    return {
        "scheduled_ms": batch.scheduled_ms,
        "prefill_tokens": sum(piece.num_new for piece in prefills),
        "decode_tokens": len(batch.pieces) - len(prefills),
        "prefills": [
            f"request {p.request}: {p.num_new} tokens after {p.num_cached}" for p in prefills
        ],
    }
