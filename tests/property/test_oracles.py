"""The benchmarks' lower bounds against all chunk sequences of small prompts, tried one by one."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.attainable import STEP_MS, least_ms
from bench.peers import oracle_ms
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline, single_prefill_ms

BLOCK = 64
models = st.builds(
    LatencyModel,
    st.floats(1, 50),
    st.sampled_from([0.0, 0.05]),
    st.floats(1e-2, 1),
    st.sampled_from([0.0, 1e-4, 1e-3]),
)
lengths = st.integers(1, 7 * BLOCK)
budgets = st.integers(2, 8).map(lambda blocks: blocks * BLOCK)


def shortest_ms(stages: list[LatencyModel], num_tokens: int, budget: int) -> float:
    pipeline = Pipeline(tuple(stages), max_in_flight=99)
    inner = range(BLOCK, num_tokens, BLOCK)
    plans = (
        (*ends, num_tokens)
        for count in range(len(inner) + 1)
        for ends in combinations(inner, count)
    )
    return min(
        single_prefill_ms(pipeline, 0, plan)
        for plan in plans
        if all(end - start <= budget for start, end in zip((0, *plan), plan, strict=False))
    )


@settings(max_examples=40, deadline=None)
@given(models, models, lengths, budgets)
def test_least_on_two_stages(first: LatencyModel, second: LatencyModel, num: int, budget: int):
    expected = shortest_ms([first, second], num, budget)
    least = least_ms(Pipeline((first, second)), num, budget)
    assert expected - 8 * STEP_MS <= least <= expected + 1e-9


@settings(max_examples=40, deadline=None)
@given(models, st.integers(1, 5), st.integers(1, 7), budgets)
def test_oracle_on_equal_stages(model: LatencyModel, num_stages: int, blocks: int, budget: int):
    expected = shortest_ms([model] * num_stages, blocks * BLOCK, budget)
    found, grid = oracle_ms(Pipeline((model,) * num_stages), blocks * BLOCK, budget)
    assert grid == BLOCK
    assert found <= expected * (1 + 1e-9)
    assert found == pytest.approx(expected, rel=0.03)
