"""Auto under several prefills: never much slower than fixed chunks, whatever the machine and load.

Stages may be unequal in any coefficient, a prefix cost or none, small budgets, prompts from less
than a step to many, and closed loops, bursts or Poisson arrivals.
"""

import math
import random

import pytest

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import FixedChunk
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.timeline import Timeline
from isochunk.workload import Arrival, ClosedLoop, OpenLoop, Request, Workload

MOST_SLOWER = 1.2
NUM_REQUESTS = 12


def random_pipeline(rng: random.Random) -> Pipeline:
    num_stages = rng.choice((2, 3, 4, 8))
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

    return Pipeline(tuple(stage() for _ in range(num_stages)))


def random_workload(rng: random.Random, pipeline: Pipeline) -> Workload:
    shortest = math.exp(rng.uniform(math.log(1500), math.log(50_000)))
    ratio = rng.choice((1, 3, 20))
    requests = [
        Request(int(min(shortest * ratio ** rng.random(), 131_072))) for _ in range(NUM_REQUESTS)
    ]
    kind = rng.choice(("closed", "burst", "poisson"))
    if kind == "closed":
        return ClosedLoop(requests, rng.choice((2, 4, 8)))
    if kind == "burst":
        return OpenLoop(tuple(Arrival(0.0, request) for request in requests[: rng.choice((2, 8))]))
    work_ms = sum(
        max(m.predict_ms(0, request.num_prompt) for m in pipeline.stages) for request in requests
    )
    mean_ms = work_ms / NUM_REQUESTS / rng.uniform(0.3, 0.85)
    now_ms, arrivals = 0.0, []
    for request in requests:
        arrivals.append(Arrival(now_ms, request))
        now_ms += rng.expovariate(1 / mean_ms)
    return OpenLoop(tuple(arrivals))


def run(pipeline: Pipeline, workload: Workload, budget: int) -> tuple[Timeline, Timeline]:
    """Auto, and fixed chunks of the whole budget."""
    auto = simulate(pipeline, ShortestTTFT(pipeline, budget, 64), workload, budget)
    return auto, simulate(pipeline, FixedChunk(), workload, budget)


@pytest.mark.parametrize("seed", range(120))
def test_auto_is_never_much_slower_than_the_whole_budget(seed: int) -> None:
    rng = random.Random(seed)
    pipeline = random_pipeline(rng)
    workload = random_workload(rng, pipeline)
    auto, fixed = run(pipeline, workload, rng.choice((2048, 4096, 8192, 32_768)))
    assert len(auto.requests) == len(fixed.requests)
    assert auto.mean_ttft_ms <= MOST_SLOWER * fixed.mean_ttft_ms
    assert auto.makespan_ms <= MOST_SLOWER * fixed.makespan_ms


@pytest.mark.parametrize(
    ("prefix_ms", "budget"), [(0.002, 2048), (0.005, 4096), (0.005, 8192), (0.01, 8192)]
)
def test_a_costly_prefix_is_not_paid_for_a_few_tokens(prefix_ms: float, budget: int) -> None:
    """A long head and a shorter prompt that share small steps: they take turns."""
    pipeline = Pipeline((LatencyModel(10, prefix_ms, 0.06, 0),) * 4)
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
