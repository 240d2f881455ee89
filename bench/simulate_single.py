"""One prompt on a pipeline, all policies: ``python -m bench.simulate_single``.

Every number is a TTFT from the simulator, divided by that of ``ShortestTTFT`` or as named.
Takes about 10 minutes on two cores.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
from collections.abc import Sequence

from bench.models import by_attention_share
from bench.peers import (
    ALIGNMENT,
    ASCEND_SMOOTHING,
    BUDGET,
    INITIAL_SIZES,
    SGLANG_SMOOTHING,
    equal_latency,
    oracle_ms,
    quadratic,
)
from isochunk.chunk_plan import FIXED_SIZES
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import ChunkPolicy, FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.workload import ClosedLoop, Request

LENGTHS = (8192, 32768, 131072, 262144, 1048576)
STAGES = (2, 4, 8, 16)
SHARES = (0.1, 0.4, 0.7)  # attention's share of a stage's work at 128K
FIXED_COSTS_MS = (10.0, 100.0)
PREFIX_SHARES = (0.0, 0.05)
ERROR = 0.3
REGRETS = ("first, work", "first, one", "first, all", "same, one", "same, all", "mixed, all")

Cell = tuple[int, int, float, float, float]


def ttft_ms(pipeline: Pipeline, policy: ChunkPolicy, num_tokens: int, budget: int) -> float:
    loop = ClosedLoop([Request(num_tokens)], 1)
    return simulate(pipeline, policy, loop, budget).requests[0].ttft_ms


def learning_ms(
    pipeline: Pipeline, factors: tuple[float, ...], lengths: Sequence[int]
) -> list[float]:
    """TTFTs of prompts one after the other, for a policy that starts from a wrong fit."""
    policy = ShortestTTFT(pipeline.scaled(*factors), BUDGET, ALIGNMENT)
    loop = ClosedLoop([Request(length) for length in lengths], 1)
    return [result.ttft_ms for result in simulate(pipeline, policy, loop, BUDGET).requests]


def regrets(pipeline: Pipeline, num_tokens: int, best_ms: float, has_prefix: bool) -> list[float]:
    """The worst of each kind, in the order of REGRETS."""
    sets = error_sets(has_prefix)
    same = {
        name: [learning_ms(pipeline, factors, [num_tokens] * 3) for factors in sets[name]]
        for name in sets
    }
    others = min(num_tokens, max(LENGTHS) // 2)
    mixed = [
        learning_ms(pipeline, factors, [others // 2, others * 2, num_tokens])[-1]
        for factors in sets["all"]
    ]
    worst = [
        *(max(first for first, *_ in same[name]) for name in ("work", "one", "all")),
        *(max(last for *_, last in same[name]) for name in ("one", "all")),
        max(mixed),
    ]
    return [time_ms / best_ms - 1 for time_ms in worst]


def error_sets(has_prefix: bool) -> dict[str, list[tuple[float, ...]]]:
    """Factors on c, γ, b, a: which coefficients are wrong, and how."""
    low, high = 1 - ERROR, 1 + ERROR
    used = (0, 1, 2, 3) if has_prefix else (0, 2, 3)
    single = [
        tuple(factor if i == index else 1.0 for i in range(4))
        for index in used
        for factor in (low, high)
    ]
    choices = [(low, high) if i in used else (1.0,) for i in range(4)]
    return {
        "work": [(1.0, low, low, low), (1.0, high, high, high)],
        "one": single,
        "all": list(itertools.product(*choices)),
    }


def measure(cell: Cell) -> tuple[str, dict[str, float]]:
    """A line of the table, and its numbers."""
    n, p, share, c, g = cell
    pipeline = by_attention_share(p, share, c, g)
    auto = ShortestTTFT(pipeline, BUDGET, ALIGNMENT)
    auto_ms = ttft_ms(pipeline, auto, n, BUDGET)
    fixed_ms, size = min((ttft_ms(pipeline, FixedChunk(), n, f), f) for f in FIXED_SIZES)
    atom_ms = min(ttft_ms(pipeline, equal_latency(pipeline, i), n, i) for i in INITIAL_SIZES)
    sglang_ms, ascend_ms = (
        min(ttft_ms(pipeline, quadratic(pipeline, i, s), n, i) for i in INITIAL_SIZES)
        for s in (SGLANG_SMOOTHING, ASCEND_SMOOTHING)
    )
    best_ms, grid = oracle_ms(pipeline, n)
    wrongs = regrets(pipeline, n, auto_ms, g > 0)
    assert auto.plan is not None
    row = {
        "/fixed": auto_ms / fixed_ms,
        "/ATOM": auto_ms / atom_ms,
        "/SGLang": auto_ms / sglang_ms,
        "/Ascend": auto_ms / ascend_ms,
        "/oracle": auto_ms / best_ms,
        "plan/simulated": auto.plan.makespan_ms / auto_ms,
        **{f"{name} wrong": value for name, value in zip(REGRETS, wrongs, strict=True)},
        "first, all wrong/fixed": (1 + wrongs[2]) * auto_ms / fixed_ms,
        "mixed, all wrong/fixed": (1 + wrongs[5]) * auto_ms / fixed_ms,
    }
    line = (
        f"{n:>8} {p:>3} {share:>4} {c:>5.0f} {g:>5} {len(auto.plan.ends):>5} "
        f"{auto_ms / 1e3:>8.3f} {size:>6} {row['/fixed']:>7.4f} {row['/ATOM']:>7.4f} "
        f"{row['/SGLang']:>7.4f} {row['/Ascend']:>7.4f} {row['/oracle']:>8.4f} {grid:>5} "
        + " ".join(f"{100 * value:>5.1f}" for value in wrongs)
    )
    return line, row


def main() -> None:
    print(f"TTFT of one prompt; fixed sizes {FIXED_SIZES}, ShortestTTFT's budget {BUDGET}.")
    print("Ratios < 1: ShortestTTFT is faster. Peers at their best initial size of")
    print(f"{INITIAL_SIZES}. oracle: lower bound on a grid of so many tokens.")
    print(
        "Regret [%] of a policy that starts from coefficients that are wrong by 30 %, against one"
    )
    print("that starts from the right ones; worst of all cases. work: b, a and γ are wrong")
    print("together; one: any one coefficient; all: every coefficient, each in any direction.")
    print(
        "1st: the first prompt after the fit. 3rd: the third of three prompts of that length. mix:"
    )
    print("that prompt after two others, of half and of twice the length (at most 1M).")
    print(f"{'':>95} {'1st':>5} {'1st':>5} {'1st':>5} {'3rd':>5} {'3rd':>5} {'mix':>5}")
    print(
        f"{'tokens':>8} {'P':>3} {'att':>4} {'c ms':>5} {'g/b':>5} {'K':>5} {'auto s':>8} "
        f"{'fixed':>6} {'/fixed':>7} {'/ATOM':>7} {'/SGL':>7} {'/Ascnd':>7} {'/oracle':>8} "
        f"{'grid':>5} {'work':>5} {'one':>5} {'all':>5} {'one':>5} {'all':>5} {'all':>5}"
    )
    columns: dict[str, list[float]] = {}
    cells = itertools.product(LENGTHS, STAGES, SHARES, FIXED_COSTS_MS, PREFIX_SHARES)
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for line, row in pool.imap(measure, cells):
            print(line, flush=True)
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    print(f"\n{len(columns['/fixed'])} cells {'min':>24} {'median':>8} {'max':>8}")
    for name, values in columns.items():
        print(
            f"{name:>24} {min(values):>12.4f} {statistics.median(values):>8.4f} {max(values):>8.4f}"
        )
    for name in REGRETS:
        over = sum(value > 0.03 for value in columns[f"{name} wrong"])
        print(f"regret, {name} wrong: over 3 % in {over} of {len(columns['/fixed'])} cells")


if __name__ == "__main__":
    main()
