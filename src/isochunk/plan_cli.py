"""``isochunk plan``: what chunking will do, before anything is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from isochunk.latency import InvalidLatencyModelError, LatencyModel
from isochunk.makespan import Pipeline
from isochunk.plan_html import write_html
from isochunk.planning import (
    Prediction,
    advise_partition,
    candidates,
    predict,
    recommend_budget,
    run_candidate,
)
from isochunk.profile import ProfileError, load_profile
from isochunk.samples import SamplesError, fit_samples
from isochunk.trace_export import write_trace

DEFAULT_PROMPTS = [8192, 32768, 131072]
DEFAULT_BUDGET = 32768
DEFAULT_ALIGNMENT = 64


def plan(
    *,
    profile: Annotated[
        Path | None, typer.Option(help="Saved profile (JSON) with per-stage models.")
    ] = None,
    fit_samples_file: Annotated[
        Path | None,
        typer.Option("--fit-samples", help="CSV: stage,num_cached,num_new,latency_ms."),
    ] = None,
    stage_ms_per_1k: Annotated[
        list[float] | None,
        typer.Option(help="ms per 1024 new tokens on a stage, without attention; once or --pp ×."),
    ] = None,
    attention_share: Annotated[
        float, typer.Option(min=0, max=0.99, help="Attention's share at the longest prompt.")
    ] = 0.4,
    fixed_ms: Annotated[float, typer.Option(min=0, help="Fixed ms of a forward.")] = 10.0,
    prefix_share: Annotated[
        float, typer.Option(min=0, help="Cost of a cached token per chunk / of a new one (MLA).")
    ] = 0.0,
    transfer_ms: Annotated[float, typer.Option(min=0, help="Between stages, per step.")] = 0.0,
    prompt_tokens: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest budget to consider.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers by stage, e.g. 15,15,15,16, for advice on them.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a picture of the pipeline.")] = None,
) -> None:
    """Predict TTFT and throughput by policy, and recommend settings, from stage timings."""
    console = Console()
    prompts = sorted(set(prompt_tokens or DEFAULT_PROMPTS))
    budget = max_num_batched_tokens or DEFAULT_BUDGET
    alignment, known_layers = DEFAULT_ALIGNMENT, None
    try:
        if sum(x is not None for x in (profile, fit_samples_file, stage_ms_per_1k or None)) != 1:
            raise ValueError("give exactly one of --profile, --fit-samples and --stage-ms-per-1k")
        if profile is not None:
            loaded = load_profile(profile)
            pipeline, alignment, known_layers = (
                loaded.to_pipeline(),
                loaded.alignment,
                loaded.layers,
            )
            budget = max_num_batched_tokens or loaded.max_num_batched_tokens
        elif fit_samples_file is not None:
            reports = fit_samples(fit_samples_file)
            for stage, report in enumerate(reports):
                console.print(f"stage {stage}: {report}", markup=False, highlight=False)
            models = tuple(r.model for r in reports if r.model is not None)
            pipeline = Pipeline(models, transfer_ms)
        else:
            pipeline = _rough(
                stage_ms_per_1k or [],
                pp=pp,
                attention_share=attention_share,
                fixed_ms=fixed_ms,
                prefix_share=prefix_share,
                longest=max(prompts),
            )
            pipeline = Pipeline(pipeline.stages, transfer_ms)
        if pp is not None and pp != pipeline.num_stages:
            raise ValueError(f"--pp={pp}, but the models are of {pipeline.num_stages} stages")
        layer_counts = _layers(layers, pipeline.num_stages) or known_layers
    except (ProfileError, SamplesError, InvalidLatencyModelError, ValueError) as error:
        typer.echo(f"isochunk plan: {error}", err=True)
        raise typer.Exit(2) from error
    concurrencies = sorted(set(concurrency or [1]))
    total = len(prompts) * len(concurrencies) * len(candidates(pipeline, budget, alignment))
    with Progress(
        TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    ) as progress:
        rows = list(
            progress.track(
                predict(pipeline, prompts, concurrencies, budget, alignment), total=total
            )
        )
    for num_prompt in prompts:
        for clients in concurrencies:
            chosen = [r for r in rows if (r.num_prompt, r.concurrency) == (num_prompt, clients)]
            console.print(_table(num_prompt, clients, chosen))
    advice = recommend_budget(pipeline, prompts, budget, alignment)
    console.print(f"Recommended: --max-num-batched-tokens {advice} with policy auto", markup=False)
    if layer_counts is not None:
        partition = advise_partition(pipeline.stages, layer_counts, max(prompts) // 2, advice)
        verdict = (
            f"{','.join(map(str, partition.advised))} (slowest stage "
            f"{partition.slowest_ms:.0f} -> {partition.advised_slowest_ms:.0f} ms)"
            if partition.is_better
            else f"keep {','.join(map(str, partition.layers))}"
        )
        console.print(f"Layer partition: {verdict}", markup=False, highlight=False)
    if trace is not None or html is not None:
        _draw(
            pipeline,
            rows,
            budget=budget,
            alignment=alignment,
            num_prompt=max(prompts),
            trace=trace,
            html=html,
        )
        console.print("Wrote", *(str(path) for path in (trace, html) if path is not None))


def _rough(
    stage_ms_per_1k: list[float],
    *,
    pp: int | None,
    attention_share: float,
    fixed_ms: float,
    prefix_share: float,
    longest: int,
) -> Pipeline:
    """Stage models from rough numbers; attention takes its share of the longest prompt."""
    num_stages = pp or max(len(stage_ms_per_1k), 2)
    if len(stage_ms_per_1k) == 1:
        stage_ms_per_1k = stage_ms_per_1k * num_stages
    if len(stage_ms_per_1k) != num_stages:
        raise ValueError(
            f"--stage-ms-per-1k was given {len(stage_ms_per_1k)} times; expected once, or once "
            f"for each of the {num_stages} stages"
        )
    models = []
    for value in stage_ms_per_1k:
        token_ms = value / 1024
        attention_ms = attention_share / (1 - attention_share) * token_ms / longest
        models.append(LatencyModel(fixed_ms, prefix_share * token_ms, token_ms, attention_ms))
    return Pipeline(tuple(models))


def _layers(text: str | None, num_stages: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers={text!r} is not a list such as 15,15,15,16") from None
    if len(layers) != num_stages or min(layers) < 1:
        raise ValueError(f"--layers={text!r} must be {num_stages} numbers >= 1, one a stage")
    return layers


def _table(num_prompt: int, concurrency: int, rows: list[Prediction]) -> Table:
    best_fixed = min(row.ttft_ms for row in rows if row.name.startswith("fixed"))
    table = Table(title=f"{num_prompt} tokens, concurrency {concurrency}", title_justify="left")
    table.add_column("policy")
    for column in ("steps", "mean TTFT (s)", "/ best fixed", "prompt tok/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_steps),
            f"{row.ttft_ms / 1000:.3f}",
            f"{row.ttft_ms / best_fixed:.3f}",
            f"{row.prompt_tokens_per_s:.0f}",
            style="bold" if row.name == "auto" else None,
        )
    return table


def _draw(
    pipeline: Pipeline,
    rows: list[Prediction],
    *,
    budget: int,
    alignment: int,
    num_prompt: int,
    trace: Path | None,
    html: Path | None,
) -> None:
    """The longest prompt: the best fixed size above auto; the trace is auto's."""
    fixed = [r for r in rows if r.num_prompt == num_prompt and r.name.startswith("fixed")]
    best = min((r for r in fixed if r.concurrency == rows[0].concurrency), key=lambda r: r.ttft_ms)
    by_name = {c.name: c for c in candidates(pipeline, budget, alignment)}
    timelines = [
        (name, run_candidate(pipeline, by_name[name], num_prompt, best.concurrency))
        for name in (best.name, "auto")
    ]
    if html is not None:
        write_html(timelines, html)
    if trace is not None:
        write_trace(timelines[-1][1], trace)
