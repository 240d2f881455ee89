"""The ``isochunk bench`` command."""

from __future__ import annotations

import platform
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from isochunk.benchmark.engine import BenchEngine, BenchError
from isochunk.benchmark.run import (
    HEADER,
    Cell,
    compare,
    describe,
    make_profile,
    table_rows,
    to_markdown,
    write_results,
)
from isochunk.probes import longest_too_short
from isochunk.profile import save_profile
from isochunk.progress_bar import counting_progress
from isochunk.report import render_bars

DEFAULT_FIXED = (256, 512, 1024, 2048, 4096, 8192)
BUILT_IN = ("toy", "smollm2")


def bench(
    model: Annotated[str, typer.Argument(help="Model directory, hub name, 'toy' or 'smollm2'.")],
    *,
    prompt_tokens: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.")] = None,
    variable: Annotated[bool, typer.Option(help="Also prompts of N/8..N tokens.")] = False,
    fixed: Annotated[list[int] | None, typer.Option(min=1, help="Fixed sizes; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    pp: Annotated[int, typer.Option(min=2, help="Pipeline stages.")] = 2,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of auto.")] = 8192,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[str, typer.Option()] = "auto",
    enforce_eager: Annotated[bool, typer.Option()] = True,
    max_fit_error: Annotated[
        float | None,
        typer.Option(min=0.001, max=0.5, help="The setting of that name, for a noisy machine."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the results.")] = Path("bench-out"),
) -> None:
    """Compare TTFT and throughput of fixed sizes, equal-latency and auto on the real engine."""
    console = Console()
    lengths = prompt_tokens or [16384]
    sizes = fixed or [s for s in DEFAULT_FIXED if s <= max_num_batched_tokens]
    if max(sizes) > max_num_batched_tokens:
        raise typer.BadParameter(
            f"--fixed {max(sizes)} exceeds --max-num-batched-tokens {max_num_batched_tokens}"
        )
    longest = max(lengths)
    if longest <= longest_too_short(max_num_batched_tokens, needs_shrink=False):
        raise typer.BadParameter(
            f"--prompt-tokens {longest} isn't enough: auto is calibrated with prompts above half "
            f"of --max-num-batched-tokens ({max_num_batched_tokens})"
        )
    if max_model_len is not None and max_model_len <= longest:
        raise typer.BadParameter(
            f"--max-model-len {max_model_len} must exceed --prompt-tokens ({longest})"
        )
    if model in BUILT_IN:
        from isochunk.demo.models import make_smollm2, make_toy_model  # noqa: PLC0415  (heavy)

        make = make_toy_model if model == "toy" else make_smollm2
        model = str(make(out / "models" / model))
    policies = [*(f"fixed:{size}" for size in sizes), "equal-latency", "auto"]
    cells = [
        Cell(length, clients, is_variable)
        for is_variable in ([False, True] if variable else [False])
        for clients in concurrency or [1]
        for length in lengths
    ]
    options = {
        "pipeline_parallel_size": pp,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len or longest + 64,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "max_num_seqs": 64,
    }
    # "auto" calibrates; the equal-latency rule is then made from the same models.
    smallest = min(4096, max_num_batched_tokens // 4)
    settings: dict[str, Any] = {"policy": "auto", "min_chunk_size": smallest}
    if max_fit_error is not None:
        settings["max_fit_error"] = max_fit_error
    try:
        with closing(BenchEngine(model, settings, options)) as engine:
            console.print(f"calibrated after {engine.calibrate(longest)} prompts")
            with counting_progress(console, is_transient=False) as progress:
                task = progress.add_task("running", total=len(cells) * len(policies) * rounds)
                comparisons = compare(
                    engine,
                    cells,
                    policies,
                    rounds,
                    lambda text: progress.update(task, advance=1, description=text),
                )
            description = describe(engine, model, rounds)
            profile = make_profile(engine, model, platform.machine())
    except BenchError as error:
        console.print(f"isochunk bench: {error}", markup=False)
        raise typer.Exit(1) from error
    for comparison in comparisons:
        table = Table(*HEADER, title=str(comparison.cell))
        for row in table_rows(comparison):
            table.add_row(*row)
        console.print(table)
    bars = {
        str(c.cell): {m.policy: (m.ttft_s, m.predicted_ttft_s) for m in c.measurements}
        for c in comparisons
    }
    html = render_bars("Chunk policies on vLLM", description, bars)
    write_results(out, comparisons, description, html)
    save_profile(profile, out / "profile.json")
    console.print(f"Wrote {out}/bench.json, bench.md, bench.html and profile.json", markup=False)
    if not console.is_terminal:
        console.print(to_markdown(comparisons, description), markup=False, highlight=False)
