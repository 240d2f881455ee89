"""The simulator: order of events, packing, the in-flight limit, arrivals, batches' costs."""

import math
import statistics
from pathlib import Path

import pytest

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline, single_prefill_ms
from isochunk.pipeline import EventKind, SimulationError, batch_times_ms, simulate
from isochunk.policies import ChunkDecision, ChunkReason, FixedChunk, Prefill, Step
from isochunk.stages import dominant_stages
from isochunk.timeline import Piece
from isochunk.workload import (
    Arrival,
    ClosedLoop,
    OpenLoop,
    Request,
    WorkloadError,
    poisson,
    read_arrivals,
)
from tests.lower_bounds import lower_bounds_ms

PER_TOKEN = LatencyModel(0.0, 0.0, 1.0, 0.0)  # 1 ms a token


def pipeline(num_stages: int = 2, **kwargs: float) -> Pipeline:
    return Pipeline((PER_TOKEN,) * num_stages, **kwargs)


class Recorder(FixedChunk):
    """Fixed chunks; remembers what the steps looked like."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def begin_step(self, step: Step) -> None:
        self.steps.append(step)


class Sizes:
    """Given sizes, one after the other."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def begin_step(self, step: Step) -> None:
        pass

    def size(self, prefill: Prefill, num_allowed: int) -> ChunkDecision:
        return ChunkDecision(self.sizes.pop(0), ChunkReason.MODEL)


def test_noise_is_repeatable_and_spreads_batch_times():
    def lengths(**noise: float) -> list[float]:
        loop = ClosedLoop([Request(40_000)], 1)
        batches = simulate(pipeline(), FixedChunk(), loop, 100, **noise).batches
        return [batch.spans[0].end_ms - batch.spans[0].start_ms for batch in batches]

    noisy = [math.log(ms / 100) for ms in lengths(noise=0.05, seed=3)]
    assert lengths() == [100] * 400
    assert lengths(noise=0.05, seed=3) == lengths(noise=0.05, seed=3)
    assert lengths(noise=0.05, seed=3) != lengths(noise=0.05, seed=4)
    assert 0.04 < statistics.stdev(noisy) < 0.06


def test_two_stages_overlap_chunks_of_one_prompt():
    timeline = simulate(pipeline(), FixedChunk(), OpenLoop((Arrival(0, Request(300)),)), 100)
    assert [b.spans for b in timeline.batches] == [
        ((0, 100), (100, 200)),
        ((100, 200), (200, 300)),
        ((200, 300), (300, 400)),
    ]
    assert timeline.requests[0].ttft_ms == timeline.makespan_ms == 400
    # Two batches in flight: the third is scheduled when the first is done.
    assert [b.scheduled_ms for b in timeline.batches] == [0, 0, 200]
    assert timeline.stage_busy_fraction(0) == 0.75


def test_in_flight_limit_delays_a_long_chunk_behind_a_short_one():
    # The documented example: closed form 31, with two batches in flight 40.
    loop = OpenLoop((Arrival(0, Request(21)),))
    assert simulate(pipeline(), Sizes(10, 1, 10), loop, 10).makespan_ms == 40
    deeper = pipeline(max_in_flight=3)
    assert simulate(deeper, Sizes(10, 1, 10), loop, 10).makespan_ms == 31
    assert single_prefill_ms(pipeline(), 0, [10, 11, 21]) == 40


def test_transfer_time_delays_the_next_stage_but_not_the_same_one():
    timeline = simulate(
        pipeline(transfer_fixed_ms=5.0, transfer_token_ms=0.1, max_in_flight=3),
        FixedChunk(),
        OpenLoop((Arrival(0, Request(200)),)),
        100,
    )
    assert timeline.batches[0].spans == ((0, 100), (115, 215))
    assert timeline.batches[1].spans == ((100, 200), (215, 315))


def test_batch_costs_the_fixed_part_once_and_prefixes_for_prefills_only():
    model = LatencyModel(7.0, 0.5, 2.0, 0.01)
    pieces = (Piece(0, 100, 10, False, False), Piece(1, 40, 1, True, True))
    prefill = 0.5 * 100 + 2 * 10 + 0.01 * (2 * 100 * 10 + 10**2)
    decode = 2 * 1 + 0.01 * (2 * 40 + 1)
    assert batch_times_ms(Pipeline((model,)), pieces) == pytest.approx([7 + prefill + decode])


def test_batch_completion_comes_before_an_arrival_at_the_same_time_and_scheduling_last():
    assert EventKind.BATCH_DONE < EventKind.ARRIVAL < EventKind.SCHEDULE
    # Request 0 ends at t = 20, exactly when 1 and 2 arrive: one step sees both, not three.
    arrivals = (Arrival(0, Request(10)), Arrival(20, Request(4)), Arrival(20, Request(5)))
    recorder = Recorder()
    timeline = simulate(pipeline(), recorder, OpenLoop(arrivals), 100)
    seen = [[p.request_id for p in step.prefills] for step in recorder.steps if step.prefills]
    assert seen == [["0"], ["1", "2"]]
    assert [piece.request for piece in timeline.batches[1].pieces] == [1, 2]
    assert timeline.batches[1].scheduled_ms == 20


def test_simultaneous_arrivals_keep_their_order():
    arrivals = tuple(Arrival(3.0, Request(n)) for n in (5, 1, 3))
    timeline = simulate(pipeline(), FixedChunk(), OpenLoop(arrivals), 6)
    assert [(p.request, p.num_new) for p in timeline.batches[0].pieces] == [(0, 5), (1, 1)]


def test_running_requests_come_before_waiting_ones():
    arrivals = (Arrival(0, Request(150)), Arrival(0, Request(80)))
    recorder = Recorder()
    timeline = simulate(pipeline(), recorder, OpenLoop(arrivals), 100)
    pieces = [[(p.request, p.num_cached, p.num_new) for p in b.pieces] for b in timeline.batches]
    assert pieces == [[(0, 0, 100)], [(0, 100, 50), (1, 0, 50)], [(1, 50, 30)]]
    assert [step.num_running for step in recorder.steps if step.prefills] == [0, 1, 1]


def test_decode_waits_for_its_previous_token_and_shares_steps():
    arrivals = (Arrival(0, Request(10, 0, 3)), Arrival(15, Request(30)))
    timeline = simulate(pipeline(), FixedChunk(), OpenLoop(arrivals), 100)
    decodes = [b for b in timeline.batches if any(p.is_decode for p in b.pieces)]
    assert len(decodes) == 2
    assert decodes[0].scheduled_ms == timeline.requests[0].first_token_ms == 20
    assert decodes[1].scheduled_ms >= decodes[0].spans[-1].end_ms
    assert [p.num_cached for b in decodes for p in b.pieces] == [10, 11]


def test_max_num_seqs_of_one_serves_one_after_the_other():
    arrivals = (Arrival(0, Request(250)), Arrival(0, Request(10)))
    timeline = simulate(pipeline(), FixedChunk(), OpenLoop(arrivals), 100, max_num_seqs=1)
    assert all(len(batch.pieces) == 1 for batch in timeline.batches)
    assert timeline.requests[1].first_token_ms > timeline.requests[0].finished_ms


@pytest.mark.parametrize("cached", [0, 50, 99, 100, 400])
def test_prefix_hit_is_skipped_but_one_token_is_always_computed(cached):
    timeline = simulate(pipeline(), FixedChunk(), ClosedLoop([Request(100, cached)], 1), 1000)
    (piece,) = timeline.batches[0].pieces
    assert piece.num_cached == min(cached, 99)
    assert piece.num_cached + piece.num_new == 100


def test_closed_loop_keeps_its_concurrency_and_can_run_twice():
    loop = ClosedLoop([Request(10)] * 5, 2)
    for _ in range(2):
        timeline = simulate(pipeline(1), FixedChunk(), loop, 10)
        assert [r.arrival_ms for r in timeline.requests] == [0, 0, 10, 20, 30]


@pytest.mark.parametrize("size", [-1, 101])
def test_policy_out_of_range_is_an_error(size):
    with pytest.raises(SimulationError, match=rf"sized {size} tokens, allowed are 0..100"):
        simulate(pipeline(), Sizes(size), ClosedLoop([Request(500)], 1), 100)


def test_policy_without_progress_is_an_error():
    with pytest.raises(SimulationError, match="no progress: 0 running and 1 waiting"):
        simulate(pipeline(), Sizes(0), ClosedLoop([Request(5)], 1), 100)


def test_poisson_is_seeded_and_has_about_its_rate():
    requests = [Request(10)] * 2000
    arrivals = poisson(requests, 50.0, seed=3).arrivals
    assert arrivals == poisson(requests, 50.0, seed=3).arrivals
    assert arrivals != poisson(requests, 50.0, seed=4).arrivals
    assert arrivals[-1].time_ms == pytest.approx(40_000, rel=0.1)
    with pytest.raises(WorkloadError, match="rate_per_s=0"):
        poisson(requests, 0, seed=1)


def test_trace_file(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,prompt_tokens,cached_tokens\n1.5,100,64\n0.5,10,0\n")
    assert read_arrivals(path).arrivals == (
        Arrival(0.0, Request(10, 0)),
        Arrival(1000.0, Request(100, 64)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timestamp,prompt_tokens\n1,2\n", "column cached_tokens is missing"),
        ("timestamp,prompt_tokens,cached_tokens\n1,x,0\n", r"csv:2: prompt_tokens='x'"),
        ("timestamp,prompt_tokens,cached_tokens\n1,5,9\n", r"csv:2: cached_tokens=9"),
        ("timestamp,prompt_tokens,cached_tokens\n-1,5,0\n", r"csv:2: timestamp='-1'"),
        ("timestamp,prompt_tokens,cached_tokens\n1,0,0\n", r"csv:2: prompt_tokens='0'"),
        ("timestamp,prompt_tokens,cached_tokens\n1,5\n", r"csv:2: cached_tokens=None"),
        ("timestamp,prompt_tokens,cached_tokens\n1,1e300,0\n", "prompt_tokens='1e300' is not"),
        (
            "timestamp,prompt_tokens,cached_tokens\n1e306,1,0\n2,1,0\n",
            "csv: timestamp spans inf s",
        ),
        (
            "timestamp,prompt_tokens,cached_tokens\n0,1,0\n60000000000,1,0\n",
            "timestamps are in seconds",
        ),
        ("timestamp,prompt_tokens,cached_tokens\n", "no arrivals"),
    ],
)
def test_bad_trace_names_line_and_field(tmp_path: Path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_arrivals(path)


def test_percentile_is_of_short_prompts_only_where_asked():
    arrivals = (Arrival(0, Request(10)), Arrival(0, Request(100)))
    timeline = simulate(pipeline(1), FixedChunk(), OpenLoop(arrivals), 100)
    assert timeline.ttft_percentile_ms(99, max_prompt=10) == 100
    assert timeline.ttft_percentile_ms(99) == 110
    assert timeline.prompt_tokens_per_s == pytest.approx(1000)


def test_dominant_stages_keeps_those_that_can_be_slowest():
    small, tall, wide = (LatencyModel(c, 0, b, 0) for c, b in ((1, 1), (9, 1), (1, 9)))
    assert dominant_stages([small, tall, wide, tall]) == [tall, wide]
    assert dominant_stages([small, small]) == [small]


def test_lower_bounds_are_below_the_makespan_and_tight_for_one_stage():
    import numpy as np

    starts, ends, counts = np.array([[0, 30, 90]]), np.array([[30, 90, 100]]), np.array([3])
    for stages in (1, 2, 5):
        bound = lower_bounds_ms(pipeline(stages), starts, ends, counts)[0]
        makespan = single_prefill_ms(pipeline(stages), 0, [30, 90, 100])
        assert bound <= makespan
        assert (bound == makespan) == (stages == 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stages": ()}, "stages is empty"),
        ({"stages": (PER_TOKEN,), "max_in_flight": -1}, "max_in_flight=-1"),
        ({"stages": (PER_TOKEN,), "transfer_fixed_ms": -1.0}, "transfer_fixed_ms=-1.0"),
    ],
)
def test_bad_pipeline(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(**kwargs)
