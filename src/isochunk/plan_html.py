"""A picture of the pipeline: stages × time, fixed chunks above dynamic ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from isochunk.timeline import Batch, Timeline

COLOURS = ("#1f77b4", "#aec7e8", "#ff7f0e", "#ffbb78", "#2ca02c", "#98df8a", "#9467bd", "#c5b0d5")
BACKGROUND = "#f4f4f4"
MAX_STEPS = 500
"""More of them make a picture that no browser likes; the trace has them all."""


def pipeline_figure(timelines: Sequence[tuple[str, Timeline]]) -> go.Figure:
    """One panel a timeline, on a common time axis; gaps between the bars are bubbles."""
    # All panels end at the same time, or one would seem to be idle from its last step on.
    long = [t.batches for _, t in timelines if len(t.batches) > MAX_STEPS]
    until_ms = min((batches[MAX_STEPS].scheduled_ms for batches in long), default=math.inf)
    titles = [
        f"{name}: {timeline.makespan_ms / 1000:.3f} s, {len(timeline.batches)} steps, "
        f"stages idle {100 * _idle(timeline):.0f} %"
        f"{f' (the first {until_ms / 1000:.1f} s shown)' if long else ''}"
        for name, timeline in timelines
    ]
    figure = make_subplots(
        rows=len(timelines), cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.12
    )
    for row, (_, timeline) in enumerate(timelines, start=1):
        shown = [batch for batch in timeline.batches if batch.scheduled_ms < until_ms]
        for stage in range(timeline.pipeline.num_stages):
            figure.add_trace(_bars(shown, stage), row=row, col=1)
        figure.update_yaxes(autorange="reversed", row=row, col=1)
    figure.update_xaxes(title_text="time [s]", row=len(timelines), col=1)
    stages = max(timeline.pipeline.num_stages for _, timeline in timelines)
    figure.update_layout(
        showlegend=False,
        barmode="overlay",
        bargap=0.15,
        plot_bgcolor=BACKGROUND,
        height=len(timelines) * (120 + 40 * stages),
        title="Prefill on the pipeline: one bar is one step on one stage, gaps are bubbles",
    )
    return figure


def write_html(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Write the picture as one file that needs no network."""
    pipeline_figure(timelines).write_html(path, include_plotlyjs=True, full_html=True)


def _idle(timeline: Timeline) -> float:
    stages = range(timeline.pipeline.num_stages)
    return 1.0 - sum(timeline.stage_busy_fraction(stage) for stage in stages) / len(stages)


def _bars(batches: Sequence[Batch], stage: int) -> go.Bar:
    spans = [batch.spans[stage] for batch in batches]
    return go.Bar(
        orientation="h",
        y=[f"stage {stage}"] * len(spans),
        base=[span.start_ms / 1000 for span in spans],
        x=[(span.end_ms - span.start_ms) / 1000 for span in spans],
        marker={
            "color": [COLOURS[batch.index % len(COLOURS)] for batch in batches],
            "line": {"color": "white", "width": 1},
        },
        hovertext=[_describe(batch) for batch in batches],
        hoverinfo="text+x",
    )


def _describe(batch: Batch) -> str:
    pieces = [f"{p.num_new} tokens after {p.num_cached}" for p in batch.pieces if not p.is_decode]
    return "<br>".join([f"step {batch.index}", *pieces])
