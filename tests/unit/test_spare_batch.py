"""One batch more in flight: who asks for it, when, and what the simulator makes of it."""

from itertools import pairwise

import pytest

from isochunk.config import DynamicChunkingConfig
from isochunk.controller import ChunkController
from isochunk.feedback import believed_by
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.policies import FixedChunk, Prefill, Step
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.timeline import Timeline
from isochunk.workload import Arrival, ClosedLoop, OpenLoop, Request

MODEL = LatencyModel(5.0, 0.0, 0.02, 5e-6)
PIPELINE = Pipeline((MODEL, MODEL))
SPARE = Pipeline((MODEL, MODEL), may_spare=True)
PREFILL = Prefill("a", 0, 20_000)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (Step([PREFILL]), True),
        (Step([PREFILL], 0, 1), True),
        (Step([PREFILL], 1, 1, 0, 1), False),  # a decode
        (Step([PREFILL], 0, 1, 0, 1), False),  # a decode whose token is in flight
        (Step([PREFILL], 0, 1, 1), False),  # another prompt waits
        (Step([PREFILL, Prefill("b", 0, 10)]), False),
        (Step([], 0, 0, 0, 1), False),
    ],
)
def test_wanted_only_while_a_prefill_is_alone(step: Step, wanted: bool) -> None:
    policy = ShortestTTFT(SPARE, 8192, 64)
    policy.begin_step(step)
    assert policy.wants_spare_batch is wanted
    usual = ShortestTTFT(PIPELINE, 8192, 64)
    usual.begin_step(step)
    assert not usual.wants_spare_batch


def in_flight(timeline: Timeline) -> list[int]:
    """When a batch was scheduled: how many were under way then, itself included."""
    ends = [batch.spans[-1].end_ms for batch in timeline.batches]
    return [
        sum(end > batch.scheduled_ms for end in ends[: batch.index + 1])
        for batch in timeline.batches
    ]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_simulated_queue_holds_one_more_for_a_sole_prompt_only(num_stages: int) -> None:
    pipe = Pipeline((MODEL,) * num_stages, may_spare=True)
    policy = ShortestTTFT(pipe, 8192, 64)
    alone = simulate(pipe, policy, OpenLoop((Arrival(0, Request(60_000)),)), 8192)
    assert max(in_flight(alone)) == num_stages + 1
    # While a request decodes, the usual depth.
    both = OpenLoop((Arrival(0, Request(100, num_output=10_000)), Arrival(500, Request(60_000))))
    policy = ShortestTTFT(pipe, 8192, 64)
    assert max(in_flight(simulate(pipe, policy, both, 8192))) == num_stages
    fixed = simulate(pipe, FixedChunk(), OpenLoop((Arrival(0, Request(60_000)),)), 2048)
    assert max(in_flight(fixed)) == num_stages


def test_a_spare_batch_costs_nothing_where_nothing_is_lost_between_steps() -> None:
    loop = OpenLoop((Arrival(0, Request(60_000)),))
    with_spare, without = (
        simulate(pipe, ShortestTTFT(pipe, 8192, 64), loop, 8192) for pipe in (SPARE, PIPELINE)
    )
    assert with_spare.mean_ttft_ms <= 1.001 * without.mean_ttft_ms
    starts = [batch.spans[0].start_ms for batch in with_spare.batches]
    assert all(before < after for before, after in pairwise(starts))


def test_only_the_sole_prefill_is_planned_with_it() -> None:
    policy = ShortestTTFT(SPARE, 8192, 64)
    assert policy.pipeline.depth == 3
    # With several prefills two batches are in flight, and that is a full pipeline.
    simulate(SPARE, policy, ClosedLoop([Request(20_000)] * 40, 4), 8192)
    assert policy.offered_load > 0.9


def test_nothing_is_spared_where_the_engine_cannot() -> None:
    loop = OpenLoop((Arrival(0, Request(60_000)),))
    policy = ShortestTTFT(SPARE, 8192, 64)
    assert max(in_flight(simulate(PIPELINE, policy, loop, 8192))) == 2


def controller(**settings: object) -> ChunkController:
    made = ChunkController(
        DynamicChunkingConfig(enabled=True, **settings),
        max_num_batched_tokens=8192,
        alignment=64,
        num_stages=2,
        max_model_len=100_000,
        can_spare=True,
    )
    made.add_sweep([(stage, [(4096, 90.0), (8192, 180.0)]) for stage in (0, 1)])
    return made


@pytest.mark.parametrize("policy", ["auto", "equal-latency", "fixed"])
def test_other_policies_keep_what_the_engine_does(policy: str) -> None:
    made = controller(policy=policy)
    made.begin_step(Step([PREFILL]))
    made.size(PREFILL, 8192)
    assert made.wants_spare_batch is (policy == "auto")


def test_a_request_that_asks_for_fixed_chunks_gets_the_usual_depth() -> None:
    made = controller()
    made.begin_step(Step([PREFILL]))
    made.size(PREFILL, 8192, FixedChunk())
    assert not made.wants_spare_batch
    made.begin_step(Step([PREFILL]))
    assert made.wants_spare_batch


def test_the_calibration_knows_whether_its_probes_had_the_spare_batch() -> None:
    made = controller()
    made.begin_step(Step([PREFILL]))
    assert made.end_step({"a": made.size(PREFILL, 8192)}) is not None
    assert made.calibrator.was_spared
    beside_a_decode = Step([PREFILL], 1, 1, 0, 1)
    made.begin_step(beside_a_decode)
    assert made.end_step({"a": made.size(PREFILL, 8192), "decode": 1}) is not None
    assert not made.calibrator.was_spared
    assert not controller(policy="equal-latency").calibrator.was_spared


@pytest.mark.parametrize("usual", [Pipeline((MODEL, MODEL), max_in_flight=3), SPARE, PIPELINE])
def test_what_a_policy_believes_leaves_the_batches_in_flight_alone(usual: Pipeline) -> None:
    policy = ShortestTTFT(usual, 8192, 64)
    simulate(usual.scaled(1, 1, 1, 1.5), policy, ClosedLoop([Request(40_000)] * 3, 1), 8192)
    believed = believed_by(policy, usual)
    assert believed.stages == policy.feedback.believed.stages != usual.stages
    assert (believed.depth, believed.may_spare) == (usual.depth, usual.may_spare)
    assert believed_by(FixedChunk(), usual) is believed_by(None, usual) is usual
