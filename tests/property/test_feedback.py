"""Feedback from completions: what it must learn, and what must not disturb it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.factors import MAX_FACTOR
from isochunk.feedback import CompletionFeedback
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.workload import ClosedLoop, Request

BUDGET = 8192
wrong_by = st.floats(0.7, 1.3)
pipelines = st.builds(
    lambda num_stages, c, g, a: Pipeline((LatencyModel(c, g, 0.05, a),) * num_stages),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([10.0, 50.0]),
    st.sampled_from([0.0, 2e-3]),
    st.sampled_from([2e-7, 1e-6, 3e-6]),
)


def scaled(pipeline, factors):
    c, g, b, a = factors
    stages = [
        LatencyModel(m.fixed_ms * c, m.prefix_ms * g, m.token_ms * b, m.attention_ms * a)
        for m in pipeline.stages
    ]
    return Pipeline(tuple(stages), pipeline.transfer_fixed_ms)


def run(pipeline, policy, lengths, **noise):
    loop = ClosedLoop([Request(length) for length in lengths], 1)
    return [r.ttft_ms for r in simulate(pipeline, policy, loop, BUDGET, **noise).requests]


class Deaf(ShortestTTFT):
    """Never learns."""

    def begin_step(self, step):
        self.feedback = CompletionFeedback(self.feedback.fitted)
        super().begin_step(step)


@settings(max_examples=40)
@given(pipelines, st.tuples(wrong_by, wrong_by, wrong_by, wrong_by))
def test_regret_is_small_after_two_prompts_of_other_lengths(pipeline, factors):
    best = run(pipeline, ShortestTTFT(pipeline, BUDGET, 64), [16384])[-1]
    policy = ShortestTTFT(scaled(pipeline, factors), BUDGET, 64)
    assert run(pipeline, policy, [8192, 32768, 16384])[-1] <= 1.03 * best


@settings(max_examples=25)
@given(pipelines, st.lists(st.integers(1, 40_000), min_size=1, max_size=6))
def test_a_right_model_stays_as_it_is(pipeline, lengths):
    policy = ShortestTTFT(pipeline, BUDGET, 64)
    run(pipeline, policy, lengths)
    policy.feedback.learn()
    assert policy.feedback.pipeline is pipeline


@settings(max_examples=60)
@given(pipelines, st.data())
def test_stays_in_bounds_whatever_the_clock_says(pipeline, data):
    feedback = CompletionFeedback(pipeline, data.draw(st.integers(0, 3)))
    chunks = st.one_of(st.none(), st.tuples(st.integers(0, 10**6), st.integers(1, 32768)))
    jumps = st.one_of(st.floats(), st.floats(0, 1000), st.sampled_from([-1e9, 0.0, 1e-9, 1e15]))
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        jump = data.draw(jumps)
        now = now + jump if math.isfinite(jump) else jump
        action = data.draw(st.sampled_from(["schedule", "schedule", "complete", "learn"]))
        if action == "schedule":
            feedback.scheduled(now, data.draw(chunks))
        elif action == "complete":
            feedback.completed(now)
        else:
            feedback.learn()
        now = now if math.isfinite(now) else 0.0
    feedback.learn()
    assert all(1 / MAX_FACTOR - 1e-9 <= f <= MAX_FACTOR + 1e-9 for f in feedback.factors)


class Stalling(CompletionFeedback):
    """The engine hangs for some seconds now and then, in the middle of a prompt."""

    late_ms = 0.0
    count = 0

    def scheduled(self, now_ms, chunk):
        super().scheduled(now_ms + self.late_ms, chunk)

    def completed(self, now_ms):
        self.count += 1
        if self.count % 9 == 0:
            self.late_ms += 5000.0
        super().completed(now_ms + self.late_ms)


@settings(max_examples=20)
@given(pipelines, st.tuples(wrong_by, wrong_by, wrong_by, wrong_by))
def test_stalls_are_not_mistaken_for_chunk_times(pipeline, factors):
    best = run(pipeline, ShortestTTFT(pipeline, BUDGET, 64), [32768])[-1]
    policy = ShortestTTFT(scaled(pipeline, factors), BUDGET, 64)
    first = run(pipeline, policy, [32768])[-1]
    policy.feedback = Stalling(policy.pipeline)
    last = run(pipeline, policy, [16384, 32768, 24576, 32768])[-1]
    assert last <= max(1.03 * best, 1.01 * first)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("prefix_ms", [0.0, 2e-3])
def test_noise_does_not_spoil_a_right_model(num_stages, prefix_ms):
    pipeline = Pipeline((LatencyModel(30.0, prefix_ms, 0.05, 1e-6),) * num_stages)
    lengths = [16384, 32768] * 8
    deaf = run(pipeline, Deaf(pipeline, BUDGET, 64), lengths, noise=0.05, seed=1)
    learning = run(pipeline, ShortestTTFT(pipeline, BUDGET, 64), lengths, noise=0.05, seed=1)
    assert sum(learning) <= 1.01 * sum(deaf)


@pytest.mark.parametrize("num_stages", [4, 8])
def test_helps_a_wrong_model_in_spite_of_noise(num_stages):
    pipeline = Pipeline((LatencyModel(30.0, 2e-3, 0.05, 1e-6),) * num_stages)
    fit = scaled(pipeline, (1.3, 1.3, 0.7, 1.3))
    lengths = [16384, 32768] * 6
    deaf = run(pipeline, Deaf(fit, BUDGET, 64), lengths, noise=0.05, seed=1)
    learning = run(pipeline, ShortestTTFT(fit, BUDGET, 64), lengths, noise=0.05, seed=1)
    assert sum(learning) < 0.99 * sum(deaf)


def test_only_batches_with_one_prefill_are_learnt_from():
    pipeline = Pipeline((LatencyModel(30.0, 0.0, 0.05, 1e-6),) * 2)
    policy = ShortestTTFT(scaled(pipeline, (1.0, 1.0, 0.7, 1.3)), BUDGET, 64)
    loop = ClosedLoop([Request(16384, 0, 200)] * 8, 4)  # prefills beside others and decodes
    simulate(pipeline, policy, loop, BUDGET)
    sole = [run for run in policy.feedback._to_learn if len(run.new) > 1]
    assert not sole


def test_uneven_stages_get_common_factors():
    stages = (LatencyModel(20.0, 0.0, 0.04, 8e-7), LatencyModel(30.0, 0.0, 0.05, 1e-6))
    pipeline = Pipeline(stages, transfer_fixed_ms=2.0)
    policy = ShortestTTFT(scaled(pipeline, (1.0, 1.0, 1.3, 0.7)), BUDGET, 64)
    run(pipeline, policy, [8192, 32768, 16384, 32768])
    policy.feedback.learn()
    assert np.allclose(policy.feedback.factors[2:], [1 / 1.3, 1 / 0.7], rtol=0.1)


def test_a_settled_model_is_looked_at_now_and_then_and_an_unsettled_one_at_once():
    pipeline = Pipeline((LatencyModel(30.0, 2e-3, 0.05, 1e-6),) * 2)
    policy = ShortestTTFT(pipeline, BUDGET, 64)
    updates = []
    learn = policy.feedback.learn

    def counting_learn(min_new=0):
        before = policy.feedback.belief
        learn(min_new)
        updates.append(policy.feedback.belief is not before)

    policy.feedback.learn = counting_learn
    for _ in range(4):  # not settled yet: each prompt at once
        updates.clear()
        run(pipeline, policy, [50_000])
        assert any(updates)
    updates.clear()
    run(pipeline, policy, [50_000] * 12)
    assert 2 <= sum(updates) <= 4
    assert policy.feedback.pipeline is pipeline
    # The machine changes: found after a few prompts, and then followed at once.
    slower = pipeline.scaled(1.0, 1.0, 1.0, 1.4)
    run(slower, policy, [50_000] * 5)
    assert policy.feedback.pipeline is not pipeline
    updates.clear()
    run(slower, policy, [50_000])
    assert any(updates)
