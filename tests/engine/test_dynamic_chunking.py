"""Dynamic chunking in the real engine: calibration, sizes, windows, caches, aborts."""

from typing import Any

import pytest

from isochunk.chunk_plan import plan_chunks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkReason
from isochunk.shortest_ttft import ShortestTTFT
from tests.engine.conftest import Engine, random_prompt
from tests.engine.worker_checks import leftovers


def chunks_of_one(engine: Engine, num_tokens: int, seed: int) -> list[tuple[int, int, str]]:
    with engine.trace() as log:
        engine.generate([random_prompt(num_tokens, seed)])
    (request_id,) = {chunk[0] for chunk in log.chunks}
    return log.of(request_id)


def test_installs_within_the_first_single_requests_and_cleans_up(make_engine: Any) -> None:
    with make_engine() as engine:
        before = engine.core.model_executor.collective_rpc(leftovers)
        assert all(before)  # hooks and wrapper are on while it calibrates
        assert engine.calibrate(6144) <= 8
        assert len(engine.controller.models) == 2
        assert not engine.scheduler._adapter._is_timing
        assert engine.core.model_executor.collective_rpc(leftovers) == [[], []]


def test_chunks_shrink_with_the_prefix_and_cover_the_prompt(engine: Engine) -> None:
    chunks = chunks_of_one(engine, 8192, seed=1)
    sizes = [new for _, new, _ in chunks]
    assert sum(sizes) == 8192
    assert [cached for cached, _, _ in chunks] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert {reason for _, _, reason in chunks} == {ChunkReason.MODEL}
    assert sizes[0] == 1024
    assert sizes[-3] < 0.6 * sizes[0]
    alignment = engine.controller.alignment
    assert all(size % alignment == 0 for size in sizes[:-1])


def test_fixed_by_request_is_stock_chunking(engine: Engine) -> None:
    with engine.trace() as log:
        engine.generate([random_prompt(5000, seed=2)], fixed=True)
    assert [new for _, _, new, _ in log.chunks] == [1024] * 4 + [904]
    assert {reason for *_, reason in log.chunks} == {ChunkReason.FIXED}


def test_overlapping_prefills_keep_the_fixed_budget_then_resume(engine: Engine) -> None:
    chunks_of_one(engine, 8192, seed=10)  # no other prefill in the last 16 steps
    with engine.trace() as log:
        engine.generate([random_prompt(1500, seed=4), random_prompt(20000, seed=3)])
    short, long = dict.fromkeys(chunk[0] for chunk in log.chunks)
    assert {reason for *_, reason in log.of(short)} == {ChunkReason.OTHER_PREFILLS}
    reasons = [reason for *_, reason in log.of(long)]
    assert reasons[0] == ChunkReason.OTHER_PREFILLS
    switch = reasons.index(ChunkReason.MODEL)
    assert switch >= 15  # alone for 16 steps by then
    assert set(reasons[switch:]) == {ChunkReason.MODEL}
    assert {new for _, new, _ in log.of(long)[1:switch]} == {1024}


@pytest.mark.parametrize("num_shared", [100, 1024, 3968])
def test_prefix_cache_hit_is_sized_at_the_true_prefix(
    caching_engine: Engine, num_shared: int
) -> None:
    shared = random_prompt(num_shared, seed=50 + num_shared)
    caching_engine.generate([shared + random_prompt(200, seed=6)])
    with caching_engine.trace() as log:
        caching_engine.generate([shared + random_prompt(4096, seed=7)])
    cached = log.chunks[0][1]
    block = caching_engine.scheduler.block_size
    assert cached == num_shared // block * block
    controller = caching_engine.controller
    remaining = num_shared + 4096 - cached
    pipeline = controller.policy.pipeline  # as corrected by what earlier prompts have shown
    plan = plan_chunks(pipeline, cached, remaining, 1024, controller.alignment)
    assert [chunk[1] + chunk[2] for chunk in log.chunks] == list(plan.ends)
    assert sum(new for _, _, new, _ in log.chunks) == num_shared + 4096 - cached


def test_all_but_the_last_token_cached(caching_engine: Engine) -> None:
    block = caching_engine.scheduler.block_size
    prompt = random_prompt(8 * block, seed=9)
    (first,) = caching_engine.generate([prompt], max_tokens=4)
    (again,) = caching_engine.generate([prompt], max_tokens=4)
    assert first == again


def test_abort_in_flight_frees_everything(engine: Engine) -> None:
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    free_before = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for i in range(6):
        prompt = {"prompt_token_ids": random_prompt(8192, seed=20 + i)}
        llm_engine.add_request(f"abort-{i}", prompt, SamplingParams(max_tokens=8))
        for _ in range(i):
            llm_engine.step()
        llm_engine.abort_request([f"abort-{i}"])
    while llm_engine.has_unfinished_requests() or engine.core.batch_queue:
        llm_engine.step()
        if engine.core.batch_queue:
            engine.core.step_fn()
    assert engine.scheduler._adapter.controller.num_in_flight == 0
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free_before
    assert sum(new for _, new, _ in chunks_of_one(engine, 4096, seed=30)) == 4096


def test_prompt_up_to_the_context_length(engine: Engine) -> None:
    chunks = chunks_of_one(engine, 24575, seed=31)
    assert sum(new for _, new, _ in chunks) == 24575


def test_reports_chunks_by_reason_in_the_metrics(engine: Engine) -> None:
    from prometheus_client import REGISTRY

    def value() -> float:
        return REGISTRY.get_sample_value("isochunk_chunks_total", {"reason": "model"}) or 0.0

    before = value()
    num_chunks = len(chunks_of_one(engine, 4096, seed=32))
    engine.generate([random_prompt(10, seed=33)])  # counts are exported step by step
    assert value() - before >= num_chunks
    assert REGISTRY.get_sample_value("isochunk_model_installed") == 1


def test_auto_packs_overlapping_prompts_and_completes_them(caching_engine: Engine) -> None:
    """Several long and short prompts at once: sized from the model, every token exactly once."""
    lengths = [9000, 200, 7000, 1500, 64, 5000, 300, 3000]
    prompts = [random_prompt(length, seed=200 + i) for i, length in enumerate(lengths)]
    with caching_engine.trace() as log:
        outputs = caching_engine.generate(prompts, max_tokens=3)
    assert [len(tokens) for tokens in outputs] == [3] * len(lengths)
    scheduled: dict[str, int] = {}
    for request_id, _, new, _ in log.chunks:
        scheduled[request_id] = scheduled.get(request_id, 0) + new
    # A prompt's last token alone isn't a prefill to size.
    assert all(
        0 <= full - found <= 1
        for full, found in zip(sorted(lengths), sorted(scheduled.values()), strict=True)
    )
    assert ChunkReason.MODEL in {reason for *_, reason in log.chunks}
    assert caching_engine.scheduler._adapter.controller.num_in_flight == 0


def test_prompts_take_turns_where_every_piece_pays_for_its_prefix(caching_engine: Engine) -> None:
    """A long head and a short prompt: steps without the one that runs first, tokens unchanged."""
    prompts = [random_prompt(length, seed=300 + length) for length in (12_000, 3000)]
    expected = caching_engine.generate(prompts, fixed=True, max_tokens=4)
    caching_engine.llm.reset_prefix_cache()
    controller = caching_engine.controller
    policy, steps = controller.policy, []
    stages = (LatencyModel(1.0, 0.05, 0.01, 0.0),) * 2
    controller.policy = ShortestTTFT(Pipeline(stages), 1024, controller.alignment)
    end_step = controller.end_step

    def recording_end_step(scheduled: dict[str, int]) -> int | None:
        steps.append(dict(scheduled))
        return end_step(scheduled)

    controller.end_step = recording_end_step
    try:
        assert caching_engine.generate(prompts, max_tokens=4) == expected
    finally:
        controller.policy = policy
        del controller.end_step
    head, short = sorted({request for step in steps for request in step}, key=int_of)
    turns = [step for step in steps if step.get(short, 0) > 64 and head not in step]
    assert len(turns) >= 3000 // 1024
    assert sum(step.get(head, 0) for step in steps) == 12_000 + 3
    assert sum(step.get(short, 0) for step in steps) == 3000 + 3


def int_of(request_id: str) -> int:
    """vLLM numbers its offline requests."""
    return int(request_id.partition("-")[0])
