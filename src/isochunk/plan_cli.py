"""``isochunk plan``: what chunking will do, before anything is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isochunk.plan_html import write_html
from isochunk.plan_inputs import (
    Source,
    from_profile,
    from_rough_numbers,
    from_samples,
    parse_layers,
)
from isochunk.planning import (
    Load,
    Prediction,
    advise_partition,
    better_fixed,
    candidates,
    closed_loops,
    poisson_loads,
    predict,
    recommend_budget,
    run_candidate,
)
from isochunk.progress_bar import counting_progress
from isochunk.trace_export import write_trace
from isochunk.workload import MAX_PROMPT, read_arrivals

DEFAULT_PROMPTS = [8192, 32768, 131072]
MIN_RATE, MAX_RATE = 1e-4, 1e4


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
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, max=MAX_PROMPT, help="Repeatable.")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests/s that come at random moments (Poisson); repeatable."),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(help="CSV: timestamp \\[s],prompt_tokens,cached_tokens; instead of prompts."),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 1,
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
    try:
        prompts, loads, drawn = _loads(prompt_tokens, concurrency, rate, arrivals, output_tokens)
        if sum(x is not None for x in (profile, fit_samples_file, stage_ms_per_1k or None)) != 1:
            raise ValueError("give exactly one of --profile, --fit-samples and --stage-ms-per-1k")
        if profile is not None:
            source = from_profile(profile)
        elif fit_samples_file is not None:
            source = from_samples(fit_samples_file, transfer_ms)
        else:
            source = from_rough_numbers(
                stage_ms_per_1k or [],
                pp=pp,
                attention_share=attention_share,
                fixed_ms=fixed_ms,
                prefix_share=prefix_share,
                transfer_ms=transfer_ms,
                longest=max(prompts),
            )
        pipeline, alignment = source.pipeline, source.alignment
        budget = max_num_batched_tokens or source.budget
        if pp is not None and pp != pipeline.num_stages:
            raise ValueError(f"--pp={pp}, but the models are of {pipeline.num_stages} stages")
        layer_counts = source.layers
        if layers is not None:
            layer_counts = parse_layers(layers, pipeline.num_stages)
    except ValueError as error:
        typer.echo(f"isochunk plan: {error}", err=True)
        raise typer.Exit(2) from error
    for stage, report in enumerate(source.reports):
        console.print(f"stage {stage}: {report}", markup=False, highlight=False)
    total = len(loads) * len(candidates(pipeline, budget, alignment))
    with counting_progress(console, is_transient=True) as progress:
        rows = list(
            progress.track(
                predict(pipeline, loads, budget, alignment), total=total, description="simulating"
            )
        )
        progress.add_task("comparing budgets", total=None)
        advice = recommend_budget(pipeline, rows, budget, alignment)
    for load in loads:
        console.print(_table(load.title, [row for row in rows if row.load is load]))
    fixed = better_fixed(rows)
    console.print(
        f"Recommended: --max-num-batched-tokens {advice} with policy auto"
        if fixed is None
        else f"Recommended: --max-num-batched-tokens {fixed.max_num_batched_tokens} with policy "
        f"fixed: auto's mean TTFT is {fixed.auto_ratio:.2f} times as long",
        markup=False,
    )
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
        chosen = [row for row in rows if row.load is drawn]
        try:
            _draw(source, budget, chosen, trace=trace, html=html)
        except OSError as error:
            typer.echo(f"isochunk plan: can't be written: {error}", err=True)
            raise typer.Exit(1) from error
        console.print("Wrote", *(str(path) for path in (trace, html) if path is not None))


def _loads(
    prompt_tokens: list[int] | None,
    concurrency: list[int] | None,
    rate: list[float] | None,
    arrivals: Path | None,
    output_tokens: int,
) -> tuple[list[int], list[Load], Load]:
    """Prompt lengths; loads; and the one to draw: of closed loops the longest prompt's first."""
    if arrivals is not None:
        if prompt_tokens or concurrency or rate:
            raise ValueError(
                f"--arrivals={arrivals} brings its own requests; leave out --prompt-tokens, "
                "--concurrency and --rate"
            )
        trace = read_arrivals(arrivals, output_tokens)
        load = Load(f"requests of {escape(arrivals.name)}: {len(trace.arrivals)}", trace)
        return sorted({arrival.request.num_prompt for arrival in trace.arrivals}), [load], load
    prompts = sorted(set(prompt_tokens or DEFAULT_PROMPTS))
    rates = sorted(set(rate or []))
    for value in rates:
        if not MIN_RATE <= value <= MAX_RATE:
            raise ValueError(f"--rate={value} must be {MIN_RATE:g} to {MAX_RATE:g} requests/s")
    concurrencies = sorted(set(concurrency or ([] if rates else [1])))
    loops = closed_loops(prompts, concurrencies, output_tokens)
    loads = [*loops, *poisson_loads(prompts, rates, output_tokens)]
    return prompts, loads, loads[max(len(loops) - len(concurrencies), 0)]


def _table(title: str, rows: list[Prediction]) -> Table:
    best_fixed = min(row.ttft_ms for row in rows if row.name.startswith("fixed"))
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("steps", "mean TTFT (s)", "/ best fixed", "p99 TTFT (s)", "prompt tok/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_steps),
            f"{row.ttft_ms / 1000:.3f}",
            f"{row.ttft_ms / best_fixed:.3f}",
            f"{row.p99_ttft_ms / 1000:.3f}",
            f"{row.prompt_tokens_per_s:.0f}",
            style="bold" if row.name == "auto" else None,
        )
    return table


def _draw(
    source: Source,
    budget: int,
    rows: list[Prediction],
    *,
    trace: Path | None,
    html: Path | None,
) -> None:
    """One load: the best fixed size above auto; the trace is auto's."""
    best = min((row for row in rows if row.name.startswith("fixed")), key=lambda row: row.ttft_ms)
    by_name = {c.name: c for c in candidates(source.pipeline, budget, source.alignment)}
    timelines = [
        (name, run_candidate(source.pipeline, by_name[name], best.load))
        for name in (best.name, "auto")
    ]
    if html is not None:
        write_html(timelines, html)
    if trace is not None:
        write_trace(timelines[-1][1], trace)
