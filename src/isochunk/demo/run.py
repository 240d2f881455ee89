"""``isochunk demo``: fixed against dynamic chunks on two models, one page of results."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from isochunk.client import Answer, Client
from isochunk.demo.models import make_smollm2, make_toy_model
from isochunk.demo.prompts import document_prompt, random_prompt
from isochunk.demo.server import VllmServer
from isochunk.latency import LatencyModel
from isochunk.progress_bar import counting_progress
from isochunk.report import Bar, Section, render_page
from isochunk.timings import read_trace

MAX_CALIBRATION_PROMPTS = 8
make_varied_toy = partial(make_toy_model, distinct_tokens=True)
FIXED, DYNAMIC = "fixed", "dynamic"


@dataclass(frozen=True)
class Scenario:
    """A model, how it is served, and what it is asked."""

    name: str
    make_model: Callable[[Path], Path]
    prompt_tokens: int
    max_num_batched_tokens: int
    max_model_len: int
    max_tokens: int

    def ask(self, client: Client, seed: int, fixed: bool) -> Answer:
        """One long prompt; the same for both configurations of a round."""
        if self.make_model is make_smollm2:
            content = document_prompt(
                self.prompt_tokens, seed, lambda text: len(client.tokenize(text))
            )
            return client.chat(content, fixed=fixed, max_tokens=self.max_tokens)
        prompt = random_prompt(self.prompt_tokens, seed)
        return client.complete(prompt, fixed=fixed, max_tokens=self.max_tokens)


SCENARIOS = (
    Scenario("Toy Llama (random weights, 8 layers)", make_varied_toy, 16384, 8192, 20480, 16),
    Scenario("SmolLM2-135M-Instruct", make_smollm2, 4000, 2048, 8192, 32),
)


def run_demo(out: Path, rounds: int) -> int:
    """Run all scenarios, print the results and write ``out/index.html``; returns 0 or 1."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    sections, all_equal = [], True
    with counting_progress(console, is_transient=False) as progress:
        for scenario in SCENARIOS:
            section, equal = _run_scenario(scenario, out, rounds, progress)
            sections.append(section)
            all_equal &= equal
    page = out / "index.html"
    page.write_text(render_page("Dynamic Chunked Pipeline Parallel on vLLM", sections))
    console.print(f"\nWrote [bold]{page}[/bold] after {time.monotonic() - start:.0f} s.")
    return 0 if all_equal else 1


def _run_scenario(
    scenario: Scenario, out: Path, rounds: int, progress: Progress
) -> tuple[Section, bool]:
    task = progress.add_task(f"{scenario.name}: making the model", total=2 + rounds * 2)
    slug = scenario.name.split()[0].lower()
    model = scenario.make_model(out / "models" / slug)
    trace = out / f"{slug}-trace.jsonl"
    trace.unlink(missing_ok=True)
    progress.update(task, description=f"{scenario.name}: starting vLLM, 2 stages")
    args = ["--pipeline-parallel-size", "2", "--enforce-eager", "--dtype", "float32"]
    args += ["--max-num-batched-tokens", str(scenario.max_num_batched_tokens)]
    args += ["--max-model-len", str(scenario.max_model_len), "--max-num-seqs", "4"]
    args += ["--no-enable-prefix-caching"]  # a round asks the same prompt twice
    args += ["--enable-dynamic-chunking", "--dynamic-chunking-allow-request-override"]
    args += ["--dynamic-chunking-max-fit-error", "0.2"]  # laptops and VMs have noisy timings
    args += ["--dynamic-chunking-trace-file", str(trace)]
    answers: dict[str, list[Answer]] = {FIXED: [], DYNAMIC: []}
    with VllmServer(model, args, out / f"{slug}-server.log") as server:
        server.wait_until_healthy(tick=progress.refresh)
        client = Client(server.url, server.model)
        progress.update(task, advance=1, description=f"{scenario.name}: calibrating")
        for seed in range(1000, 1000 + MAX_CALIBRATION_PROMPTS):
            if client.is_model_installed():
                break
            scenario.ask(client, seed, fixed=False)
        progress.update(task, advance=1)
        for seed in range(rounds):
            for name in (FIXED, DYNAMIC):
                progress.update(task, description=f"{scenario.name}: round {seed + 1}, {name}")
                answers[name].append(scenario.ask(client, seed, fixed=name == FIXED))
                progress.advance(task)
    progress.update(task, description=f"{scenario.name}: done")
    return _summarise(scenario, answers, trace, progress.console)


def _summarise(
    scenario: Scenario, answers: dict[str, list[Answer]], trace: Path, console: Console
) -> tuple[Section, bool]:
    by_request: dict[str, list[dict[str, Any]]] = defaultdict(list)
    samples = []
    for line in read_trace(trace):
        piece = line["pieces"][0]
        by_request[piece["request_id"]].append(line)
        if piece["reason"] == "calibration":
            samples.append(
                (line["stage"], piece["num_cached"], piece["num_new"], line["latency_ms"])
            )
    names = [f.name for f in fields(LatencyModel)]
    models = [LatencyModel(*(line[n] for n in names)) for line in read_trace(trace, "model")]
    medians = {name: median(a.ttft_s for a in given) for name, given in answers.items()}
    ratio = medians[DYNAMIC] / medians[FIXED]
    timelines, chunk_rows = {}, []
    for name, given in answers.items():
        # The round closest to the median stands for its configuration.
        typical = min(given, key=lambda a: abs(a.ttft_s - medians[name]))
        batches = next(v for k, v in by_request.items() if typical.request_id in k)
        timelines[f"{name}: TTFT {medians[name]:.2f} s (median of {len(given)})"] = _bars(batches)
        chunk_rows += _chunk_rows(name, batches)
    equal = [a.text == b.text for a, b in zip(*answers.values(), strict=True)]
    prompt_tokens = answers[DYNAMIC][0].num_prompt_tokens
    intro = (
        f"Prompts of {prompt_tokens} tokens, max_num_batched_tokens="
        f"{scenario.max_num_batched_tokens}, two stages on two CPU cores, float32, interleaved. "
        f"Median TTFT: fixed chunks {medians[FIXED]:.2f} s, dynamic {medians[DYNAMIC]:.2f} s "
        f"(× {ratio:.2f}). Greedy answers equal in {sum(equal)} of {len(equal)} rounds."
    )
    header = ("configuration", "cached", "chunk", *(f"stage {s}" for s in range(2)))
    rounds_header = ("configuration", *(f"round {i + 1}" for i in range(len(equal))), "median")
    rounds_rows = [
        (name, *(f"{a.ttft_s:.2f} s" for a in given), f"{medians[name]:.2f} s")
        for name, given in answers.items()
    ]
    console.rule(scenario.name)
    console.print(intro)
    _print_table(console, "TTFT", rounds_header, rounds_rows)
    _print_table(console, "Chunks in tokens, actual ms (predicted)", header, chunk_rows)
    _print_table(
        console,
        "Answers",
        tuple(answers),
        [tuple(repr(g[-1].text)[:400] for g in answers.values())],
    )
    section = Section(
        scenario.name,
        intro,
        timelines,
        samples,
        models,
        [(rounds_header, rounds_rows), (header, chunk_rows)],
        {f"Answer with {name} chunks": given[-1].text for name, given in answers.items()},
    )
    return section, all(equal)


def _bars(batches: list[dict[str, Any]]) -> list[Bar]:
    start_s = min(line["start_s"] for line in batches)
    return [
        Bar(
            line["stage"],
            line["start_s"] - start_s,
            line["latency_ms"] / 1e3,
            f"{line['pieces'][0]['num_new']} tokens after {line['pieces'][0]['num_cached']}: "
            f"{line['latency_ms']:.0f} ms",
        )
        for line in batches
    ]


def _chunk_rows(name: str, batches: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    chunks: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for line in batches:
        piece = line["pieces"][0]
        predicted = line["predicted_ms"]
        shown = f"{line['latency_ms']:.0f}" + (f" ({predicted:.0f})" if predicted else "")
        chunks[(piece["num_cached"], piece["num_new"])][line["stage"]] = shown
    return [
        (name, str(cached), str(new), *(stages.get(s, "") for s in range(2)))
        for (cached, new), stages in sorted(chunks.items())
    ]


def _print_table(
    console: Console, title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
