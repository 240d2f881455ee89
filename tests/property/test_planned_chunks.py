"""ShortestTTFT against fixed sizes for arbitrary stages, and against an unruly engine."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.chunk_plan import FIXED_SIZES, plan_chunks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline, single_prefill_ms
from isochunk.policies import Prefill, Step
from isochunk.shortest_ttft import ShortestTTFT

models = st.builds(
    LatencyModel,
    st.floats(0, 200),
    st.sampled_from([0.0, 1e-3]),
    st.floats(1e-3, 0.2),
    st.sampled_from([0.0, 1e-7, 1e-5]),
)
pipelines = st.builds(
    lambda stages, transfer: Pipeline(tuple(stages), transfer),
    st.one_of(
        st.lists(models, min_size=1, max_size=5),
        st.builds(lambda model, count: [model] * count, models, st.integers(2, 8)),
    ),
    st.sampled_from([0.0, 5.0]),
)


@settings(max_examples=60)
@given(pipelines, st.integers(0, 500), st.integers(1, 60_000), st.sampled_from([1024, 5000, 32768]))
def test_never_predicted_slower_than_fixed_chunks(pipeline, cached_blocks, num_new, budget):
    cached = 64 * cached_blocks
    plan = plan_chunks(pipeline, cached, num_new, budget, 64)
    total = cached + num_new
    edges = (cached, *plan.ends)
    sizes = [end - start for start, end in pairwise(edges)]
    assert plan.ends[-1] == total
    assert min(sizes) > 0
    assert max(sizes) <= budget
    assert all(end % 64 == 0 for end in plan.ends[:-1])
    for size in FIXED_SIZES:
        if size <= budget:
            ends = [*range(cached + size, total, size), total]
            assert plan.makespan_ms <= single_prefill_ms(pipeline, cached, ends) * (1 + 1e-9)


@settings(max_examples=50)
@given(pipelines, st.sampled_from([16, 64, 100, 2048, 8192]), st.data())
def test_every_prompt_ends_whatever_the_engine_does(pipeline, budget, data):
    """It drops decisions, schedules less, preempts, decodes, and lets prompts come and go."""
    policy = ShortestTTFT(pipeline, budget, 64)
    lengths = data.draw(st.lists(st.integers(1, 6000), min_size=1, max_size=5))
    prompts = {str(i): [0, length] for i, length in enumerate(lengths)}  # cached, total
    actions = st.sampled_from(["obey", "obey", "obey", "drop", "less", "preempt"])
    for _ in range(25):
        prefills = [Prefill(k, done, total - done) for k, (done, total) in prompts.items()]
        if not prefills:
            break
        decodes = data.draw(st.integers(0, min(budget - 1, 8)))
        running = sum(prefill.num_cached > 0 for prefill in prefills)
        policy.begin_step(Step(prefills, decodes, running))
        left, num_sized = budget - decodes, 0
        for index, prefill in enumerate(prefills):
            if left == 0:
                break
            allowed = min(left, prefill.num_remaining)
            new = policy.size(prefill, allowed).num_tokens
            assert 0 <= new <= allowed
            num_sized += new > 0
            # The step isn't empty, whatever the engine does about those that wait.
            assert num_sized or (index == 0 and running > 1) or 0 < index < running - 1
            if new == 0:
                continue
            action = data.draw(actions)
            if action == "less":
                new = data.draw(st.integers(1, new))
            if action == "preempt":
                prompts[prefill.request_id][0] = data.draw(st.sampled_from([0, 16]))
                prompts[prefill.request_id][0] %= prompts[prefill.request_id][1]
            elif action != "drop":
                left -= new
                prompts[prefill.request_id][0] += new
        prompts = {k: v for k, v in prompts.items() if v[0] < v[1]}
