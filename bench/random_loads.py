"""Random machines under random loads: ``python -m bench.random_loads``.

Auto against the best of seven fixed sizes, chosen for each case afterwards, and against its own
whole budget as a fixed size.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.peers import ALIGNMENT
from isochunk.chunk_plan import FIXED_SIZES
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.workload import Arrival, ClosedLoop, OpenLoop, Request, Workload, poisson

NUM_CASES = 1200
SEED = 1
NUM_REQUESTS = 16
SIZES = (512, *FIXED_SIZES)
KINDS = ("closed loop", "burst", "poisson")


@dataclass(frozen=True)
class Case:
    """A machine and what it has to do."""

    pipeline: Pipeline
    budget: int
    kind: str
    workload: Workload


@dataclass(frozen=True)
class Result:
    """Ratios of auto: above 1 is slower, for ``throughput`` below 1."""

    ttft: float
    """Mean TTFT by that of the best fixed size."""
    ttft_budget: float
    """Mean TTFT by that of the whole budget as a fixed size."""
    throughput: float
    """Prompt tokens/s by those of the best fixed size."""


def make_case(rng: random.Random) -> Case:
    """Stages equal or not, a prefix cost or none, small budgets, prompts below a step to many."""
    token = rng.uniform(0.02, 0.1)
    fixed, prefix = math.exp(rng.uniform(1, 5.3)), token * rng.choice((0, 0.02, 0.1, 0.3))
    attention = rng.choice((0, token / rng.choice((16_000, 60_000, 200_000))))
    spread = rng.choice((1.0, 1.4, 2.0))

    def stage() -> LatencyModel:
        return LatencyModel(
            fixed * rng.uniform(1 / spread, spread),
            prefix * rng.uniform(1 / spread, spread),
            token * rng.uniform(1 / spread, spread),
            attention * rng.uniform(1 / spread, spread),
        )

    pipeline = Pipeline(tuple(stage() for _ in range(rng.choice((2, 3, 4, 8)))))
    budget = rng.choice((2048, 4096, 8192, 32_768))
    shortest = math.exp(rng.uniform(math.log(1500), math.log(50_000)))
    ratio = rng.choice((1, 3, 20))
    requests = [
        Request(int(min(shortest * ratio ** rng.random(), 131_072))) for _ in range(NUM_REQUESTS)
    ]
    kind = rng.choice(KINDS)
    if kind == "closed loop":
        return Case(pipeline, budget, kind, ClosedLoop(requests, rng.choice((2, 4, 8))))
    if kind == "burst":
        together = requests[: rng.choice((2, 4, 8))]
        return Case(pipeline, budget, kind, OpenLoop(tuple(Arrival(0.0, r) for r in together)))
    work_ms = sum(max(m.predict_ms(0, r.num_prompt) for m in pipeline.stages) for r in requests)
    mean_ms = work_ms / NUM_REQUESTS / rng.uniform(0.3, 0.85)
    return Case(pipeline, budget, kind, poisson(requests, 1000.0 / mean_ms, rng.getrandbits(32)))


def run(case: Case) -> Result:
    """Simulate auto and every fixed size up to the budget."""
    pipeline, budget = case.pipeline, case.budget
    fixed = {
        size: simulate(pipeline, FixedChunk(), case.workload, size)
        for size in SIZES
        if size <= budget
    }
    policy = ShortestTTFT(pipeline, budget, ALIGNMENT)
    auto = simulate(pipeline, policy, case.workload, budget)
    return Result(
        auto.mean_ttft_ms / min(timeline.mean_ttft_ms for timeline in fixed.values()),
        auto.mean_ttft_ms / fixed[budget].mean_ttft_ms,
        auto.prompt_tokens_per_s / max(t.prompt_tokens_per_s for t in fixed.values()),
    )


def row(name: str, results: Sequence[Result]) -> str:
    ttft = sorted(result.ttft for result in results)
    own = sorted(result.ttft_budget for result in results)
    throughput = [result.throughput for result in results]
    last = int(0.99 * len(results))
    behind = sum(value > 1.02 for value in ttft) / len(ttft)
    return (
        f"{name:<12} {len(results):>5} {statistics.median(ttft):>8.3f} {ttft[last]:>6.3f} "
        f"{ttft[-1]:>6.3f} {behind:>7.0%} {statistics.median(own):>8.3f} {own[last]:>6.3f} "
        f"{own[-1]:>6.3f} {statistics.median(throughput):>8.3f} {min(throughput):>6.3f}"
    )


def main() -> None:
    rng = random.Random(SEED)
    cases = [make_case(rng) for _ in range(NUM_CASES)]
    results = [run(case) for case in cases]
    print(
        "ShortestTTFT's mean TTFT and throughput, as ratios: to the best fixed size of each case\n"
        "(chosen afterwards), and to the whole budget as a fixed size ('own')."
    )
    print(
        f"{'load':<12} {'cases':>5} {'TTFT med':>8} {'p99':>6} {'max':>6} {'> 1.02':>7} "
        f"{'own med':>8} {'p99':>6} {'max':>6} {'thr med':>8} {'min':>6}"
    )
    for kind in KINDS:
        print(row(kind, [r for case, r in zip(cases, results, strict=True) if case.kind == kind]))
    for name, has_prefix_cost in (("γ = 0", False), ("γ > 0", True)):
        chosen = [
            result
            for case, result in zip(cases, results, strict=True)
            if (case.pipeline.stages[0].prefix_ms > 0) == has_prefix_cost
        ]
        print(row(name, chosen))
    print(row("all", results))


if __name__ == "__main__":
    main()
