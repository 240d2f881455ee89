"""The simulator and the recurrence against the proportionate flow shop's closed form."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline, makespans_ms, single_prefill_ms
from isochunk.pipeline import simulate
from isochunk.policies import ChunkDecision, ChunkReason, Prefill, Step
from isochunk.workload import ClosedLoop, Request
from tests.lower_bounds import lower_bounds_ms

models = st.builds(
    LatencyModel,
    st.floats(0.01, 50),
    st.sampled_from([0.0, 1e-3]),
    st.floats(1e-3, 0.1),
    st.sampled_from([0.0, 1e-7, 1e-5]),
)
chunk_lists = st.lists(st.integers(1, 5000), min_size=1, max_size=25)


class Sizes:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = list(sizes)

    def begin_step(self, step: Step) -> None:
        pass

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        return ChunkDecision(self.sizes.pop(0), ChunkReason.MODEL)


def ends_of(cached: int, sizes: list[int]) -> list[int]:
    return [cached + sum(sizes[: i + 1]) for i in range(len(sizes))]


def simulated_ms(pipeline: Pipeline, cached: int, sizes: list[int]) -> float:
    loop = ClosedLoop([Request(cached + sum(sizes), cached)], 1)
    return simulate(pipeline, Sizes(sizes), loop, 10**6).requests[0].ttft_ms


def closed_form_ms(model: LatencyModel, num_stages: int, cached: int, sizes: list[int]) -> float:
    times = []
    for size in sizes:
        times.append(model.predict_ms(cached, size))
        cached += size
    return sum(times) + (num_stages - 1) * max(times)


def is_unimodal(values: list[float]) -> bool:
    peak = values.index(max(values))
    return values[: peak + 1] == sorted(values[: peak + 1]) and values[peak:] == sorted(
        values[peak:], reverse=True
    )


@given(models, st.integers(1, 9), st.integers(0, 5000), chunk_lists)
def test_unlimited_in_flight_is_the_closed_form(model, num_stages, cached, sizes):
    pipeline = Pipeline((model,) * num_stages, max_in_flight=len(sizes))
    expected = closed_form_ms(model, num_stages, cached, sizes)
    assert abs(simulated_ms(pipeline, cached, sizes) - expected) <= 1e-9 * expected


@given(st.integers(1, 9), chunk_lists, st.integers(0, 24))
def test_one_batch_per_stage_is_enough_for_times_that_rise_and_fall(num_stages, values, peak):
    peak = min(peak, len(values) - 1)
    sizes = sorted(values[:peak]) + sorted(values[peak:], reverse=True)
    if peak and sizes[peak - 1] > sizes[peak]:
        sizes = sorted(values)
    model = LatencyModel(3.0, 0.0, 0.01, 0.0)
    assert is_unimodal([model.predict_ms(0, s) for s in sizes])
    expected = closed_form_ms(model, num_stages, 0, sizes)
    simulated = simulated_ms(Pipeline((model,) * num_stages), 0, sizes)
    assert abs(simulated - expected) <= 1e-9 * expected


@given(models, st.integers(1, 9), st.integers(1, 4000), st.integers(1, 40))
def test_one_batch_per_stage_is_enough_for_fixed_chunks(model, num_stages, size, count):
    sizes = [size] * count
    expected = closed_form_ms(model, num_stages, 0, sizes)
    simulated = simulated_ms(Pipeline((model,) * num_stages), 0, sizes)
    assert abs(simulated - expected) <= 1e-9 * expected


@given(models, st.integers(1, 9), chunk_lists)
def test_one_batch_per_stage_is_never_below_the_closed_form(model, num_stages, sizes):
    expected = closed_form_ms(model, num_stages, 0, sizes)
    assert simulated_ms(Pipeline((model,) * num_stages), 0, sizes) >= expected * (1 - 1e-9)


@settings(max_examples=60)
@given(
    st.lists(models, min_size=1, max_size=6),
    st.integers(0, 3),
    st.tuples(st.floats(0, 20), st.floats(0, 0.01)),
    st.integers(0, 5000),
    chunk_lists,
)
def test_recurrence_equals_the_simulator_and_is_above_its_bound(
    stages, extra, transfer, cached, sizes
):
    import numpy as np

    pipeline = Pipeline(tuple(stages), *transfer, len(stages) + extra)
    expected = simulated_ms(pipeline, cached, sizes)
    ends = ends_of(cached, sizes)
    assert abs(single_prefill_ms(pipeline, cached, ends) - expected) <= 1e-9 * expected
    # Padded beside a longer plan, the result is the same.
    longer = [*ends, ends[-1]]
    both = np.array([[*ends, ends[-1]], longer])
    starts = np.concatenate([np.full((2, 1), cached), both[:, :-1]], axis=1)
    counts = np.array([len(ends), len(ends)])
    assert abs(makespans_ms(pipeline, starts, both, counts)[0] - expected) <= 1e-9 * expected
    assert lower_bounds_ms(pipeline, starts, both, counts)[0] <= expected * (1 + 1e-9)
