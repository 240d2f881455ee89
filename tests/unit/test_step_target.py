"""Step targets against brute force, and what the offered load is."""

import math
import random

import pytest

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import Prefill, Step
from isochunk.step_target import LOAD_WEIGHT, OfferedLoad, StepTarget

NONE = (0, 0)


def delay_ms(
    pipeline: Pipeline, work: tuple[float, float, float], weight: float, num_steps: float
) -> float:
    """Weighted total of the slowest stage, and a step on each of the others."""
    tokens, area, depth = work
    steps = [m.fixed_ms + m.prefix_ms * depth for m in pipeline.stages]
    works = [m.token_ms * tokens + m.attention_ms * area for m in pipeline.stages]
    if pipeline.depth < pipeline.num_stages:  # D in flight: a step holds a D-th of its way
        steps.append(sum(steps) / pipeline.depth)
        works.append(sum(works) / pipeline.depth)
    times = [s + w / num_steps for s, w in zip(steps, works, strict=True)]
    way = sum(times[: pipeline.num_stages])
    total = max(num_steps * s + w for s, w in zip(steps, works, strict=True))
    return weight * total + way - max(times)


def random_pipeline(rng: random.Random) -> Pipeline:
    num_stages = rng.choice((2, 3, 4, 8))

    def stage() -> LatencyModel:
        return LatencyModel(
            math.exp(rng.uniform(0, 6)), rng.choice((0, 1e-3)), rng.uniform(0.01, 0.1), 1e-6
        )

    stages = [stage()] * num_stages if rng.random() < 0.3 else [stage() for _ in range(num_stages)]
    return Pipeline(tuple(stages), max_in_flight=rng.choice((0, 0, 2, 16)))


@pytest.mark.parametrize("seed", range(60))
def test_no_other_number_of_steps_is_much_better(seed: int) -> None:
    """Whatever the stages: equal, unequal in work, in fixed costs or in both."""
    rng = random.Random(seed)
    pipeline = random_pipeline(rng)
    work = (math.exp(rng.uniform(6, 13)), math.exp(rng.uniform(12, 22)), rng.uniform(0, 60_000))
    count = rng.choice((1, 2, 5, 16))
    target = StepTarget(pipeline)
    target.update(work, count, NONE, 0.0)
    steps = [m.fixed_ms + m.prefix_ms * work[2] for m in pipeline.stages]
    works = [m.token_ms * work[0] + m.attention_ms * work[1] for m in pipeline.stages]
    assert target.value_ms > max(steps)
    share = (count + 1) / (2 * count)
    grid = [1.1**i for i in range(140)]
    best = min(grid, key=lambda k: delay_ms(pipeline, work, share, k))
    # The K that the target stands for: T = max(s + S/K) falls as K grows.
    low, high = 1.0, 1e7
    for _ in range(80):
        middle = math.sqrt(low * high)
        is_longer = max(s + w / middle for s, w in zip(steps, works, strict=True)) > target.value_ms
        low, high = (middle, high) if is_longer else (low, middle)
    least = delay_ms(pipeline, work, share, best)
    # max(times) isn't smooth in K; that costs up to a step on the way where stages swap.
    assert delay_ms(pipeline, work, share, low) <= 1.06 * least


def test_equal_stages_are_the_closed_form() -> None:
    target = StepTarget(Pipeline((LatencyModel(20, 0, 0.05, 0),) * 4))
    target.update((100_000, 1e9, 0.0), 1, NONE, 0.0)
    assert target.value_ms == pytest.approx(20 + math.sqrt(5000 * 20 / 3))


def test_one_batch_in_flight_is_one_step() -> None:
    target = StepTarget(Pipeline((LatencyModel(20, 0, 0.05, 0),) * 4, max_in_flight=1))
    target.update((100_000, 1e9, 0.0), 1, NONE, 0.0)
    assert target.value_ms == pytest.approx(5020, rel=0.01)


def test_under_load_steps_are_longer_but_keep_the_pipeline_full() -> None:
    pipeline = Pipeline((LatencyModel(20, 0, 0.05, 0),) * 4)
    target = StepTarget(pipeline)
    target.update((100_000, 0, 0.0), 1, (1000, 0), 1.0)
    longer = 20 + math.sqrt(5000 * 20 * (1 + LOAD_WEIGHT) / 3)
    assert target.value_ms == pytest.approx(longer)
    # Four steps hold what waits and what is in flight.
    pipeline = Pipeline((LatencyModel(100, 0, 0.05, 0),) * 4)
    few = StepTarget(pipeline)
    few.update((2000, 0, 0.0), 1, (3000, 0), 1.0)
    assert few.value_ms == pytest.approx(100 + 0.05 * (2000 + 3000) / 4)
    # Alone it is a matter of its own makespan, whatever came before.
    alone = StepTarget(pipeline)
    alone.update((2000, 0, 0.0), 1, NONE, 0.0)
    assert alone.value_ms == pytest.approx(100 + math.sqrt(100 * 100 / 3))


def test_under_load_the_target_moves_slowly() -> None:
    pipeline = Pipeline((LatencyModel(20, 0, 0.05, 0),) * 4)
    target, fresh = StepTarget(pipeline), StepTarget(pipeline)
    target.update((100_000, 0, 0.0), 1, (1000, 0), 1.0)
    before = target.value_ms
    target.update((400_000, 0, 0.0), 4, (1000, 0), 1.0)
    fresh.update((400_000, 0, 0.0), 4, (1000, 0), 1.0)
    assert before < target.value_ms < 0.5 * (before + fresh.value_ms)
    target.update((400_000, 0, 0.0), 4, NONE, 1.0)  # nothing in flight: nothing to keep in step
    assert target.value_ms == fresh.value_ms


def step_of(ids: list[str], others: int = 0) -> Step:
    return Step([Prefill(i, 0, 1000) for i in ids], 0, 1, 0, others)


def load_of(steps: list[tuple[list[str], int, int]], num_stages: int = 4) -> OfferedLoad:
    """After steps of (ids, other requests, batches in flight)."""
    load = OfferedLoad(num_stages)
    for ids, others, in_flight in steps:
        load.begin_step(step_of(ids, others), ids, in_flight)
    return load


def test_prompts_that_come_together_to_an_idle_worker_are_no_load() -> None:
    assert load_of([(list("abcdefgh"), 0, 0)] + [(list("abcdefgh"), 0, 3)] * 9).value == 0


def test_a_closed_loop_is_full_load() -> None:
    names = [f"r{i}" for i in range(40)]
    assert load_of([(names[i : i + 2], 2, 3) for i in range(39)]).value > 0.9


def test_departures_are_no_arrivals() -> None:
    assert load_of([(["a", "b", "c"], 0, 0), (["b", "c"], 1, 3), (["c"], 2, 3)]).value == 0


def test_one_after_the_other_is_no_load() -> None:
    assert load_of([([f"r{i}"], 0, 0) for i in range(20)]).value == 0


@pytest.mark.parametrize(("others", "follows"), [(1, True), (0, False)])
def test_a_prompt_follows_others_while_their_last_chunks_are_in_flight(
    others: int, follows: bool
) -> None:
    steps = [(["a"], 0, 0), (["b"], others, 1)]
    assert load_of(steps).follows_others == follows
    assert not load_of([*steps, *[(["b"], others, 3)] * 4]).follows_others
