"""One self-contained HTML page: pipeline timelines and the fitted latency model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from isochunk.latency import LatencyModel

COLOURS = ("#3b6fb6", "#e07b39", "#4f9d69", "#a05195", "#c44e52", "#8c8c8c")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       color: #222; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Bar:
    """A batch on a stage: start and duration in seconds, and a hover text."""

    stage: int
    start_s: float
    duration_s: float
    text: str


@dataclass(frozen=True)
class Section:
    """Results for one model."""

    title: str
    intro: str
    timelines: Mapping[str, Sequence[Bar]]
    """Title -> bars, drawn one above the other on one time axis."""
    samples: Sequence[tuple[int, int, int, float]] = ()
    """Measured (stage, num_cached, num_new, latency_ms)."""
    models: Sequence[LatencyModel] = ()
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    answers: Mapping[str, str] = field(default_factory=dict)


def timeline_figure(timelines: Mapping[str, Sequence[Bar]]) -> go.Figure:
    """Stages × time, one row of subplots per timeline, colours by chunk."""
    figure = make_subplots(
        rows=len(timelines), cols=1, shared_xaxes=True, subplot_titles=list(timelines)
    )
    for row, bars in enumerate(timelines.values(), start=1):
        order = {start: i for i, start in enumerate(sorted({b.start_s for b in bars}))}
        counts: dict[int, int] = {}
        for bar in sorted(bars, key=lambda b: order[b.start_s]):
            index = counts.setdefault(bar.stage, 0)
            counts[bar.stage] += 1
            figure.add_trace(
                go.Bar(
                    base=[bar.start_s],
                    x=[bar.duration_s],
                    y=[f"stage {bar.stage}"],
                    orientation="h",
                    marker={
                        "color": COLOURS[index % len(COLOURS)],
                        "line": {"color": "white", "width": 1},
                    },
                    hovertext=[bar.text],
                    hoverinfo="text",
                    showlegend=False,
                ),
                row=row,
                col=1,
            )
        figure.update_yaxes(autorange="reversed", row=row, col=1)
    figure.update_xaxes(title_text="seconds since the request was scheduled", row=len(timelines))
    figure.update_layout(
        barmode="overlay", height=90 + 150 * len(timelines), margin={"l": 70, "r": 20, "t": 40}
    )
    return figure


def fit_figure(
    samples: Sequence[tuple[int, int, int, float]], models: Sequence[LatencyModel]
) -> go.Figure:
    """Measured chunk times over the cached prefix, and the model's lines, per stage."""
    stages = sorted({s[0] for s in samples})
    sizes = sorted({s[2] for s in samples}, reverse=True)
    commonest = sorted(sizes, key=lambda x: -sum(s[2] == x for s in samples))[: len(COLOURS)]
    figure = make_subplots(cols=len(stages), subplot_titles=[f"stage {s}" for s in stages])
    deepest = max(s[1] for s in samples)
    for col, stage in enumerate(stages, start=1):
        for i, size in enumerate(sorted(commonest, reverse=True)):
            points = [s for s in samples if s[0] == stage and s[2] == size]
            common: dict[str, Any] = {"legendgroup": str(size), "name": f"{size} tokens"}
            figure.add_trace(
                go.Scatter(
                    x=[p[1] for p in points],
                    y=[p[3] for p in points],
                    mode="markers",
                    marker={"color": COLOURS[i], "size": 9},
                    showlegend=col == 1,
                    **common,
                ),
                row=1,
                col=col,
            )
            if stage < len(models):
                ends = [0, deepest]
                figure.add_trace(
                    go.Scatter(
                        x=ends,
                        y=[models[stage].predict_ms(x, size) for x in ends],
                        mode="lines",
                        line={"color": COLOURS[i], "width": 1.5},
                        showlegend=False,
                        hoverinfo="skip",
                        **common,
                    ),
                    row=1,
                    col=col,
                )
        figure.update_xaxes(title_text="cached tokens L", row=1, col=col)
    figure.update_yaxes(title_text="chunk time [ms]", row=1, col=1)
    figure.update_layout(height=380, margin={"l": 70, "r": 20, "t": 40})
    return figure


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The page as HTML, with Plotly's script inside: no network is needed to look at it."""
    parts = [_head(title)]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2><p>{escape(section.intro)}</p>")
        figures = [timeline_figure(section.timelines)]
        for header, rows in section.tables:
            parts.append(_table(header, rows))
        if section.samples:
            figures.append(fit_figure(section.samples, section.models))
        parts += [figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures]
        for stage, model in enumerate(section.models):
            parts.append(f"<p>Stage {stage}: {escape(str(model))}</p>")
        for name, text in section.answers.items():
            parts.append(f"<p>{escape(name)}</p><pre>{escape(text)}</pre>")
    return "\n".join([*parts, "</body></html>"])


def render_bars(
    title: str, description: str, cells: Mapping[str, Mapping[str, tuple[float, float]]]
) -> str:
    """A page of bar charts: cell -> policy -> (measured, predicted) TTFT in seconds."""
    parts = [_head(title), f"<p>{escape(description)}</p>"]
    for name, policies in cells.items():
        figure = go.Figure()
        for index, kind in enumerate(("measured", "predicted")):
            values = [both[index] for both in policies.values()]
            figure.add_trace(
                go.Bar(name=kind, x=list(policies), y=values, marker_color=COLOURS[index])
            )
        figure.update_layout(title=name, yaxis_title="TTFT [s]", barmode="group", height=380)
        parts.append(figure.to_html(full_html=False, include_plotlyjs=False))
    return "\n".join([*parts, "</body></html>"])


def _head(title: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<h1>{escape(title)}</h1>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table><tr>", *(f"<th>{escape(cell)}</th>" for cell in header), "</tr>"]
    for row in rows:
        lines += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])
