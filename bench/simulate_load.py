"""Closed loop of prompts of 4K–128K tokens: ``python -m bench.simulate_load``.

A prefill worker (one output token a request). Fixed means that ``max_num_batched_tokens`` is
that size; ``ShortestTTFT`` has the largest of them as its budget.
"""

from __future__ import annotations

import itertools
import random
import statistics

from bench.models import deepseek_like
from bench.peers import ALIGNMENT, BUDGET
from isochunk.chunk_plan import FIXED_SIZES
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import ChunkPolicy, FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.timeline import Timeline
from isochunk.workload import ClosedLoop, Request

CONCURRENCIES = (1, 4, 16)
STAGES = (2, 4, 8)
FIXED_COSTS_MS = (10.0, 50.0, 100.0, 200.0)
PREFIX_SHARES = (0.0, 0.05)
NUM_REQUESTS = 64
SHORTEST, LONGEST = 4096, 131072
SEED = 1


def requests(num_output: int) -> list[Request]:
    """Lengths log-uniform between the shortest and the longest."""
    rng = random.Random(SEED)
    return [
        Request(int(SHORTEST * (LONGEST / SHORTEST) ** rng.random()), 0, num_output)
        for _ in range(NUM_REQUESTS)
    ]


def run(
    pipeline: Pipeline, policy: ChunkPolicy, budget: int, concurrency: int, num_output: int
) -> Timeline:
    return simulate(pipeline, policy, ClosedLoop(requests(num_output), concurrency), budget)


def table(num_output: int) -> None:
    lengths = sorted(request.num_prompt for request in requests(num_output))
    quartile = lengths[len(lengths) // 4 - 1]
    print(
        f"\n{num_output} output token(s) a request; {NUM_REQUESTS} prompts, shortest quartile <= "
        f"{quartile} tokens.\n'fixed': the fixed size of best throughput; '/ttft': mean TTFT "
        "against the fixed size of best mean TTFT."
    )
    print(
        f"{'conc':>4} {'P':>2} {'c ms':>5} {'g/b':>5} {'fixed':>6} {'tok/s':>7} {'thr':>6} "
        f"{'mean':>6} {'/ttft':>6} {'p99 q1':>7} {'busy':>5} {'busy f':>6}"
    )
    cells: dict[int, list[tuple[float, ...]]] = {}
    for conc, p, c, g in itertools.product(CONCURRENCIES, STAGES, FIXED_COSTS_MS, PREFIX_SHARES):
        pipeline = deepseek_like(p, c, g)
        fixed = {f: run(pipeline, FixedChunk(), f, conc, num_output) for f in FIXED_SIZES}
        policy = ShortestTTFT(pipeline, BUDGET, ALIGNMENT)
        auto = run(pipeline, policy, BUDGET, conc, num_output)
        size = max(fixed, key=lambda f: fixed[f].prompt_tokens_per_s)
        best = fixed[size]
        least_ttft = min(timeline.mean_ttft_ms for timeline in fixed.values())
        row = (
            auto.prompt_tokens_per_s / best.prompt_tokens_per_s,
            auto.mean_ttft_ms / best.mean_ttft_ms,
            auto.mean_ttft_ms / least_ttft,
            auto.ttft_percentile_ms(99, quartile) / best.ttft_percentile_ms(99, quartile),
        )
        cells.setdefault(conc, []).append(row)
        print(
            f"{conc:>4} {p:>2} {c:>5.0f} {g:>5} {size:>6} {auto.prompt_tokens_per_s:>7.0f} "
            f"{row[0]:>6.3f} {row[1]:>6.3f} {row[2]:>6.3f} {row[3]:>7.3f} "
            f"{auto.stage_busy_fraction(0):>5.2f} {best.stage_busy_fraction(0):>6.2f}",
            flush=True,
        )
    for conc, rows in cells.items():
        throughput, mean, least, p99 = zip(*rows, strict=True)
        print(
            f"concurrency {conc:>2}: throughput min {min(throughput):.3f} median "
            f"{statistics.median(throughput):.3f}; mean TTFT max {max(mean):.3f} (against the "
            f"best of all fixed {max(least):.3f}); p99 TTFT of the shortest quartile max "
            f"{max(p99):.3f}"
        )


def main() -> None:
    print("ShortestTTFT against fixed sizes, as ratios: throughput > 1 and TTFT < 1 are better.")
    table(1)


if __name__ == "__main__":
    main()
