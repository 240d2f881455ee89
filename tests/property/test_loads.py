"""Auto under several prefills: never much slower than fixed chunks, whatever the machine and load.

``bench.random_loads`` has the figures for more cases.
"""

import random

import pytest

from bench.random_loads import make_case
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.timeline import Timeline
from isochunk.workload import ClosedLoop, Request, Workload

MOST_SLOWER = 1.2


def run(pipeline: Pipeline, workload: Workload, budget: int) -> tuple[Timeline, Timeline]:
    """Auto, and fixed chunks of the whole budget."""
    auto = simulate(pipeline, ShortestTTFT(pipeline, budget, 64), workload, budget)
    return auto, simulate(pipeline, FixedChunk(), workload, budget)


@pytest.mark.parametrize("seed", range(120))
def test_auto_is_never_much_slower_than_the_whole_budget(seed: int) -> None:
    case = make_case(random.Random(seed))
    auto, fixed = run(case.pipeline, case.workload, case.budget)
    assert len(auto.requests) == len(fixed.requests)
    assert auto.mean_ttft_ms <= MOST_SLOWER * fixed.mean_ttft_ms
    assert auto.makespan_ms <= MOST_SLOWER * fixed.makespan_ms


@pytest.mark.parametrize("is_everywhere", [True, False])
@pytest.mark.parametrize(
    ("prefix_ms", "budget"), [(0.002, 2048), (0.005, 4096), (0.005, 8192), (0.01, 8192)]
)
def test_a_costly_prefix_is_not_paid_for_a_few_tokens(
    prefix_ms: float, budget: int, is_everywhere: bool
) -> None:
    """A long head and a shorter prompt that share small steps: they take turns."""
    stages = (LatencyModel(10, prefix_ms, 0.06, 0),) * 4
    if not is_everywhere:  # the slowest stage of a first chunk has none
        stages = (LatencyModel(10, 0, 0.065, 0), *stages[1:])
    pipeline = Pipeline(stages)
    workload = ClosedLoop([Request(131_072), Request(30_000)] * 3, 2)
    auto, fixed = run(pipeline, workload, budget)
    assert auto.mean_ttft_ms <= 1.02 * fixed.mean_ttft_ms


@pytest.mark.parametrize(
    ("stages", "length", "concurrency"),
    [
        (((10, 0.05),) * 3 + ((40, 0.045),), 1500, 4),
        (((10, 0.05),) * 7 + ((40, 0.045),), 2000, 8),
        (((20, 0.05), (150, 0.01)), 2000, 4),
        (((150, 0.01), (20, 0.05)), 2000, 4),
    ],
)
def test_a_stage_with_a_larger_fixed_cost_counts(
    stages: tuple[tuple[float, float], ...], length: int, concurrency: int
) -> None:
    """Though another one is slower for a whole budget."""
    pipeline = Pipeline(tuple(LatencyModel(c, 0, b, 0) for c, b in stages))
    auto, fixed = run(pipeline, ClosedLoop([Request(length)] * 16, concurrency), 8192)
    assert auto.mean_ttft_ms <= 1.1 * fixed.mean_ttft_ms
