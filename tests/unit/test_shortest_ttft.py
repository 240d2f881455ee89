"""ShortestTTFT: plans of a sole prefill, packing of several, and engines that misbehave."""

import itertools
import math

import numpy as np
import pytest

from isochunk.chunk_plan import FIXED_SIZES, plan_chunks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline, makespans_ms, single_prefill_ms
from isochunk.pipeline import batch_times_ms, simulate
from isochunk.policies import ChunkDecision, ChunkReason, FixedChunk, Prefill, Step
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.step_packing import SHORT_SHARE
from isochunk.workload import Arrival, ClosedLoop, OpenLoop, Request

ALIGNMENT = 64
MODEL = LatencyModel(20.0, 0.0, 0.05, 7e-7)
MLA = LatencyModel(20.0, 0.003, 0.05, 7e-7)


def pipeline(num_stages: int = 4, model: LatencyModel = MODEL) -> Pipeline:
    return Pipeline((model,) * num_stages)


def fixed_ends(cached: int, total: int, size: int) -> list[int]:
    return [*range(cached + size, total, size), total]


def drain(policy: ShortestTTFT, prefill: Prefill, budget: int) -> list[int]:
    """Sizes of a sole prompt's chunks, as an obedient engine asks for them."""
    sizes = []
    while prefill.num_remaining:
        policy.begin_step(Step([prefill]))
        decision = policy.size(prefill, min(budget, prefill.num_remaining))
        assert decision.reason is ChunkReason.MODEL
        sizes.append(decision.num_tokens)
        new = decision.num_tokens
        prefill = Prefill(prefill.request_id, prefill.num_cached + new, prefill.num_remaining - new)
    return sizes


# -- a sole prefill ------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("model", [MODEL, MLA, LatencyModel(200.0, 0.0, 0.05, 7e-7)])
@pytest.mark.parametrize("num_prompt", [4096, 16384, 131072])
def test_shorter_than_every_fixed_size(num_stages, model, num_prompt):
    pipe = pipeline(num_stages, model)
    plan = plan_chunks(pipe, 0, num_prompt, 32768, ALIGNMENT)
    assert plan.makespan_ms == pytest.approx(single_prefill_ms(pipe, 0, plan.ends))
    for size in FIXED_SIZES:
        assert plan.makespan_ms <= single_prefill_ms(pipe, 0, fixed_ends(0, num_prompt, size))


@pytest.mark.parametrize("num_stages", [2, 3, 6])
@pytest.mark.parametrize("model", [MODEL, MLA, LatencyModel(3.0, 0.0, 0.05, 1e-5)])
@pytest.mark.parametrize("cached", [0, 4096])
def test_within_two_percent_of_every_aligned_sequence(num_stages, model, cached):
    unit = 128
    pipe, total = pipeline(num_stages, model), cached + 13 * unit - 50
    points = cached + unit * np.arange(1, 13)
    # Every subset of the points: an end that isn't taken collapses into the one before.
    taken = np.array(list(itertools.product([False, True], repeat=len(points))))
    ends = np.sort(np.where(taken, points, total), axis=1)
    ends = np.concatenate([ends, np.full((len(ends), 1), total)], axis=1)
    starts = np.concatenate([np.full((len(ends), 1), cached), ends[:, :-1]], axis=1)
    best = makespans_ms(pipe, starts, ends, taken.sum(axis=1) + 1).min()
    plan = plan_chunks(pipe, cached, total - cached, 32768, unit)
    assert best <= plan.makespan_ms <= 1.02 * best


def test_uneven_stages_are_planned_with_all_their_models():
    slow_last = Pipeline((MODEL, MODEL, MODEL, LatencyModel(26.0, 0.0, 0.07, 9e-7)))
    as_if_equal = plan_chunks(Pipeline((slow_last.stages[-1],) * 4), 0, 65536, 32768, ALIGNMENT)
    plan = plan_chunks(slow_last, 0, 65536, 32768, ALIGNMENT)
    assert plan.makespan_ms < 0.98 * single_prefill_ms(slow_last, 0, as_if_equal.ends)


def test_simulated_ttft_is_the_planned_one():
    policy = ShortestTTFT(pipeline(), 32768, ALIGNMENT)
    timeline = simulate(pipeline(), policy, ClosedLoop([Request(100_000)], 1), 32768)
    assert policy.plan is not None
    assert timeline.requests[0].ttft_ms == pytest.approx(policy.plan.makespan_ms)
    assert set(timeline.reasons) == {ChunkReason.MODEL}


def test_case_1_sizes_sum_exactly_within_the_cap_and_the_last_is_no_tiny_tail():
    sizes = drain(ShortestTTFT(pipeline(2), 4096, ALIGNMENT), Prefill("a", 0, 16384), 4096)
    assert sum(sizes) == 16384
    assert max(sizes) <= 4096
    assert min(sizes) > 0.5 * max(sizes)
    times = [MODEL.predict_ms(sum(sizes[:i]), n) for i, n in enumerate(sizes)]
    assert max(times) <= 1.1 * min(times)


def test_case_2_a_large_fixed_cost_makes_fewer_chunks():
    counts = [
        len(plan_chunks(pipeline(2, LatencyModel(c, 0.0, 0.05, 7e-7)), 0, 32768, 32768, 64).ends)
        for c in (1.0, 20.0, 200.0, 20_000.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 8
    assert counts[-1] == 1


def test_number_of_chunks_is_near_the_closed_form():
    work = 0.05 * 131072 + 7e-7 * 131072**2
    for num_stages in (2, 4, 8):
        ideal = math.sqrt((num_stages - 1) * work / 20.0)
        plan = plan_chunks(pipeline(num_stages), 0, 131072, 32768, ALIGNMENT)
        assert 0.7 * ideal <= len(plan.ends) <= 1.4 * ideal


def test_one_stage_needs_no_chunks():
    plan = plan_chunks(pipeline(1), 0, 30_000, 32768, ALIGNMENT)
    assert plan.ends == (30_000,)


@pytest.mark.parametrize("cached", [0, 8192, 16128, 16208, 16383])
def test_case_12_prefix_hits_are_planned_from_where_they_end(cached):
    sizes = drain(
        ShortestTTFT(pipeline(), 8192, ALIGNMENT), Prefill("a", cached, 16384 - cached), 8192
    )
    assert sum(sizes) == 16384 - cached
    assert min(sizes) >= 1
    ends = [cached + sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert all(end % ALIGNMENT == 0 for end in ends[:-1])
    assert single_prefill_ms(pipeline(), cached, ends) <= single_prefill_ms(
        pipeline(), cached, [16384]
    )


def test_case_13_last_tokens_of_a_long_context_are_one_chunk():
    policy = ShortestTTFT(pipeline(), 8192, ALIGNMENT)
    assert drain(policy, Prefill("a", 1_000_000 - 100, 100), 8192) == [100]


@pytest.mark.parametrize("budget", [1, 50, 100, 3072, 5000])
def test_odd_budgets_are_respected(budget):
    sizes = drain(ShortestTTFT(pipeline(), budget, ALIGNMENT), Prefill("a", 0, 700), budget)
    assert sum(sizes) == 700
    assert max(sizes) <= budget


def test_the_plan_is_kept_while_the_prompt_drains():
    policy = ShortestTTFT(pipeline(), 32768, ALIGNMENT)
    prefill = Prefill("a", 0, 100_000)
    policy.begin_step(Step([prefill]))
    policy.size(prefill, 32768)
    plan = policy.plan
    assert plan is not None
    sizes = drain(policy, prefill, 32768)
    assert policy.plan is plan
    assert [sum(sizes[: i + 1]) for i in range(len(sizes))] == list(plan.ends)


def test_planning_is_deterministic():
    plans = {plan_chunks(pipeline(4, MLA), 64, 99_999, 32768, ALIGNMENT) for _ in range(3)}
    assert len(plans) == 1


# -- engines that do not do as they are told -------------------------------------------------


def started(budget: int = 32768) -> tuple[ShortestTTFT, Prefill, ChunkDecision]:
    policy, prefill = ShortestTTFT(pipeline(), budget, ALIGNMENT), Prefill("a", 0, 100_000)
    policy.begin_step(Step([prefill]))
    return policy, prefill, policy.size(prefill, budget)


def test_a_dropped_decision_is_given_again():
    policy, prefill, decision = started()
    assert policy.size(prefill, 32768) == decision
    policy.begin_step(Step([prefill]))
    assert policy.size(prefill, 32768) == decision


def test_fewer_tokens_than_asked_come_back_to_the_plan():
    policy, _, decision = started()
    plan = policy.plan
    assert plan is not None
    partial = Prefill("a", decision.num_tokens - 1000, 100_000 - decision.num_tokens + 1000)
    policy.begin_step(Step([partial]))
    resumed = policy.size(partial, 32768)
    assert policy.plan is plan
    assert partial.num_cached + resumed.num_tokens in plan.ends
    # Right before a planned end the rest is merged into the next chunk where that is quick.
    nearly = Prefill("a", plan.ends[1] - ALIGNMENT, 100_000 - plan.ends[1] + ALIGNMENT)
    policy.begin_step(Step([nearly]))
    end = nearly.num_cached + policy.size(nearly, 32768).num_tokens
    time_ms = MODEL.predict_ms(nearly.num_cached, end - nearly.num_cached)
    assert end in plan.ends
    assert time_ms <= 1.05 * plan.target_ms


def test_a_preempted_prompt_is_planned_anew():
    policy, prefill, decision = started()
    later = Prefill("a", decision.num_tokens, 100_000 - decision.num_tokens)
    policy.begin_step(Step([later]))
    policy.size(later, 32768)
    hit = Prefill("a", 640, 100_000 - 640)
    for again in (hit, prefill):
        policy.begin_step(Step([again]))
        policy.size(again, 32768)
        assert policy.plan is not None
        assert policy.plan.num_cached == again.num_cached


def test_decode_tokens_in_the_step_shrink_the_plans_budget_not_its_progress():
    policy = ShortestTTFT(Pipeline((MODEL,)), 1024, ALIGNMENT)  # one stage: full budget at best
    prefill, sizes = Prefill("a", 0, 5000), []
    while prefill.num_remaining:
        policy.begin_step(Step([prefill], num_decode_tokens=10))
        new = policy.size(prefill, min(1024 - 10, prefill.num_remaining)).num_tokens
        sizes.append(new)
        prefill = Prefill("a", prefill.num_cached + new, prefill.num_remaining - new)
    assert sum(sizes) == 5000
    assert max(sizes) <= 1014
    assert all(sum(sizes[:i]) % ALIGNMENT == 0 for i in range(1, len(sizes)))


def test_an_overflowing_model_falls_back_to_the_fixed_budget():
    policy = ShortestTTFT(pipeline(2, LatencyModel(1e308, 0.0, 1e308, 0.0)), 8192, ALIGNMENT)
    prefill = Prefill("a", 0, 10_000)
    for others in ([], [Prefill("b", 0, 10_000)]):
        policy.begin_step(Step([prefill, *others]))
        assert policy.size(prefill, 8192) == ChunkDecision(8192, ChunkReason.UNREACHABLE)


@pytest.mark.parametrize(("budget", "alignment"), [(0, 64), (8192, 0)])
def test_bad_settings_are_named(budget, alignment):
    with pytest.raises(
        ValueError, match=f"max_num_batched_tokens={budget} and alignment={alignment}"
    ):
        ShortestTTFT(pipeline(), budget, alignment)


# -- several prefills ------------------------------------------------------------------------


def pack(policy: ShortestTTFT, step: Step, budget: int) -> list[tuple[Prefill, int]]:
    """One step as vLLM packs it."""
    policy.begin_step(step)
    left, pieces = budget - step.num_decode_tokens, []
    running = len(step.prefills) if step.num_running is None else step.num_running
    for index, prefill in enumerate(step.prefills):
        if not left:
            break
        new = policy.size(prefill, min(prefill.num_remaining, left)).num_tokens
        if not new and index >= running:
            break
        left -= new
        if new:
            pieces.append((prefill, new))
    return pieces


def step_ms(model: LatencyModel, pieces: list[tuple[Prefill, int]], decodes: int = 0) -> float:
    parts = [model.predict_ms(p.num_cached, new) - model.fixed_ms for p, new in pieces]
    return model.fixed_ms + sum(parts) + decodes * model.token_ms


@pytest.mark.parametrize("decodes", [0, 40])
def test_case_14_two_long_prompts_step_within_its_target(decodes):
    policy = ShortestTTFT(pipeline(), 32768, ALIGNMENT)
    prefills = [Prefill("a", 50_000, 50_000), Prefill("b", 0, 90_000)]
    pieces = pack(policy, Step(prefills, decodes, 1), 32768)
    work = 0.05 * 140_000 + 7e-7 * (100_000**2 - 50_000**2 + 90_000**2)
    mean_share = (2 + 1) / (2 * 2)  # of all steps, what a prompt waits for
    assert policy.target_ms == pytest.approx(20 + math.sqrt(mean_share * work * 20 / 3))
    assert 0.9 * policy.target_ms <= step_ms(MODEL, pieces, decodes) <= policy.target_ms
    # What the alignment leaves of the step goes to the next prompt.
    assert [p.request_id for p, _ in pieces] in (["a"], ["a", "b"])
    assert (50_000 + pieces[0][1]) % ALIGNMENT == 0
    assert sum(new for _, new in pieces[1:]) <= 4 * ALIGNMENT


class TargetRecorder(ShortestTTFT):
    """Remembers each step's target."""

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self.targets = [*getattr(self, "targets", []), (len(step.prefills), self.target_ms)]


def test_steps_of_a_loaded_pipeline_take_their_target_time():
    policy = TargetRecorder(pipeline(), 32768, ALIGNMENT)
    requests = [Request(n) for n in (120_000, 90_000, 110_000, 100_000) * 2]
    timeline = simulate(pipeline(), policy, ClosedLoop(requests, 4), 32768)
    checked = 0
    steps = [(count, target) for count, target in policy.targets if count]
    for batch, (count, target_ms) in zip(timeline.batches, steps, strict=True):
        time_ms = max(batch_times_ms(pipeline(), batch.pieces))
        if count > 1:
            ends = any(piece.yields_token for piece in batch.pieces)
            most_ms = target_ms * (1 + ends / (4 + 3 * (count - 1)))  # to finish a prompt
            assert 0.9 * target_ms <= time_ms <= most_ms * (1 + 1e-9)
            checked += 1
    assert checked > 20
    assert timeline.stage_busy_fraction(0) > 0.9


def test_no_step_is_longer_than_what_fixed_chunking_would_make():
    policy = ShortestTTFT(pipeline(2, LatencyModel(500.0, 0.0, 0.05, 7e-7)), 2048, ALIGNMENT)
    prefills = [Prefill("a", 60_000, 30_000), Prefill("b", 0, 5000), Prefill("c", 0, 30_000)]
    pieces = pack(policy, Step(prefills, 5, 1), 2048)
    fixed = MODEL.predict_ms(60_000, 2043) - 20 + 500 + 5 * 0.05
    assert step_ms(policy.pipeline.stages[0], pieces, 5) <= fixed < policy.target_ms
    assert [p.request_id for p, _ in pieces] == ["a", "b"]


def test_small_prompts_share_a_step_first_come_first_served():
    policy = ShortestTTFT(pipeline(), 8192, ALIGNMENT)
    prefills = [Prefill(str(i), 0, 300) for i in range(6)]
    pieces = pack(policy, Step(prefills, 0, 0), 8192)
    assert [p.request_id for p, _ in pieces] == [str(i) for i in range(len(pieces))]
    assert all(new == 300 for _, new in pieces[:-1])


def test_asking_twice_in_a_step_gives_the_same_answer():
    policy = ShortestTTFT(pipeline(), 32768, ALIGNMENT)
    prefills = [Prefill("a", 0, 90_000), Prefill("b", 0, 3000)]
    policy.begin_step(Step(prefills))
    once = [policy.size(p, min(32768, p.num_remaining)) for p in prefills]
    again = [policy.size(p, min(32768, p.num_remaining)) for p in prefills]
    assert [d.num_tokens for d in again] == [d.num_tokens for d in once]


def test_the_first_prefill_always_progresses():
    # A prefix so long that even one aligned chunk takes longer than the target.
    policy = ShortestTTFT(pipeline(2, LatencyModel(0.0, 0.0, 0.001, 1e-3)), 8192, ALIGNMENT)
    prefills = [Prefill("a", 500_032, 6400), Prefill("b", 0, 640)]
    assert pack(policy, Step(prefills), 8192)[0] == (prefills[0], ALIGNMENT)


def test_back_to_a_sole_prefill_plans_from_where_it_is():
    policy, prefill, _ = started()
    pack(policy, Step([prefill, Prefill("b", 0, 500)]), 32768)
    assert policy.plan is None
    rest = Prefill("a", 30_016, 69_984)
    policy.begin_step(Step([rest]))
    policy.size(rest, 32768)
    assert policy.plan is not None
    assert policy.plan.num_cached == 30_016


def steps_until_scheduled(
    prefills: list[Prefill], budget: int, wanted: str, model: LatencyModel = MODEL
) -> tuple[int, float, int]:
    """Steps until a prompt is wholly scheduled, the least target on the way, the head's rest."""
    policy = ShortestTTFT(pipeline(4, model), budget, ALIGNMENT)
    states, running, least = list(prefills), 1, math.inf
    for count in range(1, 500):
        pieces = dict(pack(policy, Step(states, 0, running), budget))
        least = min(least, policy.target_ms)
        running = max(running, *(i + 1 for i, p in enumerate(states) if p in pieces))
        states = [
            Prefill(
                p.request_id, p.num_cached + pieces.get(p, 0), p.num_remaining - pieces.get(p, 0)
            )
            for p in states
        ]
        finished = [p for p in states if p.num_remaining == 0]
        running -= len(finished)
        states = [p for p in states if p.num_remaining]
        if any(p.request_id == wanted for p in finished):
            return count, least, states[0].num_remaining
    raise AssertionError("starved")


@pytest.mark.parametrize("budget", [2048, 8192, 32768])
@pytest.mark.parametrize("ahead", [[], [(0, 3000)], [(0, 900_000)], [(0, 900_000), (64, 8000)] * 3])
def test_starvation_bound_of_a_short_prompt(budget, ahead):
    head = Prefill("head", 0, 1_000_000)
    between = [Prefill(f"b{i}", cached, new) for i, (cached, new) in enumerate(ahead)]
    short = Prefill("short", 0, 6000)
    count, target, rest = steps_until_scheduled([head, *between, short], budget, "short")

    def work(p: Prefill, tokens: int) -> float:
        return MODEL.predict_ms(p.num_cached, tokens) - MODEL.fixed_ms

    # Long prompts ahead cost their admission, short ones themselves.
    parts = [(p, p.num_remaining if p.num_remaining < 500_000 else 64) for p in [*between, short]]
    time_share = SHORT_SHARE * (min(target, MODEL.predict_ms(0, budget)) - 20.0)
    bound = (
        math.ceil(sum(work(p, n) for p, n in parts) / (time_share - work(short, ALIGNMENT)))
        + math.ceil(sum(n for _, n in parts) / (SHORT_SHARE * budget - ALIGNMENT))
        + 1
    )
    assert count <= bound
    assert rest > 0.5 * head.num_remaining


@pytest.mark.parametrize("budget", [2048, 8192])
@pytest.mark.parametrize("cached", [0, 30_016])
def test_a_short_prompt_has_every_other_step_where_prompts_take_turns(
    budget: int, cached: int
) -> None:
    """γL of the head is more than a whole budget of tokens."""
    model = LatencyModel(20.0, 0.005, 0.05, 0.0)
    head, short = Prefill("head", 200_000, 800_000), Prefill("short", cached, 6000)
    count, _, _ = steps_until_scheduled([head, short], budget, "short", model)
    assert count <= 2 * math.ceil(6000 / (budget - ALIGNMENT)) + 2


def test_a_short_prompt_behind_a_long_one_waits_less_than_with_fixed_chunks():
    arrivals = OpenLoop((Arrival(0, Request(130_000)), Arrival(1, Request(4000))))
    auto = simulate(pipeline(), ShortestTTFT(pipeline(), 32768, 64), arrivals, 32768)
    fixed = simulate(pipeline(), FixedChunk(), arrivals, 4096)
    assert auto.requests[1].ttft_ms < 0.5 * fixed.requests[1].ttft_ms
    # The head pays for it by at most the share's stretch.
    assert auto.requests[0].ttft_ms < fixed.requests[0].ttft_ms


def test_closed_loop_throughput_is_above_every_fixed_size():
    requests = [Request(n) for n in (100_000, 5000, 40_000, 9000, 70_000, 20_000, 4096, 60_000)]
    auto = simulate(pipeline(), ShortestTTFT(pipeline(), 32768, 64), ClosedLoop(requests, 4), 32768)
    for size in FIXED_SIZES:
        fixed = simulate(pipeline(), FixedChunk(), ClosedLoop(requests, 4), size)
        assert auto.prompt_tokens_per_s > fixed.prompt_tokens_per_s
        assert auto.mean_ttft_ms < fixed.mean_ttft_ms


@pytest.mark.parametrize("num_allowed", [1, 7, 60, 63, 64, 200, 1000])
def test_a_nearly_full_step_neither_plans_tiny_chunks_nor_spoils_the_plan(num_allowed: int) -> None:
    """Decodes may leave next to nothing of a step's budget; the plan isn't made for that."""
    uneven = Pipeline((LatencyModel(10, 0, 0.05, 1e-6), LatencyModel(12, 0, 0.06, 1.2e-6)))
    policy = ShortestTTFT(uneven, 8192, 64)
    cached, sizes = 0, []
    for step in range(6):
        prefill = Prefill("r", cached, 64_000 - cached)
        policy.begin_step(Step([prefill], 0, 1))
        chunk = policy.size(prefill, num_allowed if step == 0 else 8192).num_tokens
        assert 1 <= chunk <= (num_allowed if step == 0 else 8192)
        sizes.append(chunk)
        cached += chunk
    assert min(sizes[1:]) > 500
    assert policy.plan is not None
    assert len(policy.plan.ends) < 100


def test_prefix_hit_of_a_waiting_prompt_does_not_stop_its_admission() -> None:
    """The step lists it without its hit; it is sized at the true prefix."""
    policy = ShortestTTFT(Pipeline((LatencyModel(10, 0, 0.05, 1e-6),) * 2), 8192, 64)
    head, hit = Prefill("head", 0, 200_000), Prefill("hit", 0, 150_000)
    shorts = [Prefill(f"short{i}", 0, 500) for i in range(10)]
    policy.begin_step(Step([head, hit, *shorts], 0, 1))
    assert policy.size(head, 8192).num_tokens > 0
    assert policy.size(Prefill("hit", 1600, 148_400), 4096).num_tokens > 0


def test_reserve_that_the_engine_cannot_use_is_given_back() -> None:
    """No slot or KV block is free: waiting short prompts are never asked for."""
    policy = ShortestTTFT(Pipeline((LatencyModel(10, 0, 0.05, 0),) * 2), 8192, 64)
    shorts = [Prefill(f"short{i}", 0, 500) for i in range(10)]
    sizes, cached = [], 0
    for _ in range(8):
        head = Prefill("head", cached, 200_000 - cached)
        policy.begin_step(Step([head, *shorts], 0, 1))
        sizes.append(policy.size(head, 8192).num_tokens)
        cached += sizes[-1]
    assert all(size > 1.5 * sizes[0] for size in sizes[1:4])
