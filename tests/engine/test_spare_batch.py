"""One batch more in flight than stages, on the real engine core."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.vllm.batch_queue import SPIN_S, BatchQueue
from tests.engine.conftest import Engine, random_prompt


@contextmanager
def depths(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Of each batch with tokens: how many requests decode in it, and how many are under way."""
    scheduler, seen = engine.scheduler, []
    schedule = scheduler.schedule

    def recording_schedule(*args: Any, **kwargs: Any) -> Any:
        queue = engine.core.batch_queue
        before = sum(output.total_num_scheduled_tokens > 0 for _, output, _ in queue)
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            ones = sum(num == 1 for num in output.num_scheduled_tokens.values())
            seen.append((ones, before + 1))
        return output

    scheduler.schedule = recording_schedule
    try:
        yield seen
    finally:
        del scheduler.schedule


def test_a_sole_prompt_has_three_batches_in_flight_and_then_two_again(
    caching_engine: Engine,
) -> None:
    with depths(caching_engine) as seen:
        caching_engine.generate([random_prompt(8192, seed=300)], max_tokens=5)
    prefill = [depth for ones, depth in seen if not ones]
    assert max(prefill) == 3
    assert prefill[3:].count(3) >= len(prefill) - 5  # all along, not once
    with depths(caching_engine) as seen:  # decodes of two groups, as without us
        caching_engine.generate([random_prompt(40, seed=301 + i) for i in range(6)], max_tokens=20)
    assert max(depth for _, depth in seen) <= 2
    assert caching_engine.core.batch_queue_size == 2


def test_results_are_awaited_with_less_spinning_only_with_a_spare_batch(
    caching_engine: Engine,
) -> None:
    waits = [queue._spin_condition for queue in caching_engine.core.model_executor.response_mqs]
    seconds = [wait.busy_loop_s for wait in waits]
    assert min(seconds) > SPIN_S
    scheduler, seen = caching_engine.scheduler, []
    schedule = scheduler.schedule

    def recording_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.append((output.total_num_scheduled_tokens, [wait.busy_loop_s for wait in waits]))
        return output

    scheduler.schedule = recording_schedule
    try:
        caching_engine.generate([random_prompt(8192, seed=305)], max_tokens=5)
    finally:
        del scheduler.schedule
    assert sum(num_tokens > 1 for num_tokens, _ in seen) > 3
    for num_tokens, spins in seen:
        assert spins == ([SPIN_S] * len(waits) if num_tokens > 1 else seconds)


def test_fixed_by_request_keeps_the_usual_depth(caching_engine: Engine) -> None:
    with depths(caching_engine) as seen:
        caching_engine.generate([random_prompt(8192, seed=310)], fixed=True)
    assert max(depth for _, depth in seen) == 2


def test_other_policies_keep_the_usual_depth(engine: Engine) -> None:
    with depths(engine) as seen:
        engine.generate([random_prompt(8192, seed=311)])
    assert max(depth for _, depth in seen) == 2
    assert engine.core.batch_queue.maxlen == 2  # not even touched


def test_a_fault_of_ours_leaves_the_usual_depth_behind(make_engine: Any) -> None:
    with make_engine({"policy": "auto"}) as engine:
        engine.generate([random_prompt(3000, seed=320)])  # calibrating: the spare is in use
        assert engine.core.batch_queue.maxlen == 3
        adapter, calls = engine.scheduler._adapter, iter(range(100))
        begin_step = adapter.begin_step

        def failing_begin_step() -> None:
            if next(calls) == 4:
                raise RuntimeError("boom")
            begin_step()

        adapter.begin_step = failing_begin_step
        with depths(engine) as seen:
            engine.generate([random_prompt(12_000, seed=321)])
        assert engine.scheduler._adapter is None
        assert max(depth for _, depth in seen) == 3
        assert seen[-1][1] == 2
        with depths(engine) as seen:
            engine.generate([random_prompt(12_000, seed=322)])
        assert max(depth for _, depth in seen) == 2


@pytest.mark.parametrize("seed", range(3))
def test_any_traffic_comes_out_as_with_fixed_chunks(caching_engine: Engine, seed: int) -> None:
    """Arrivals, decodes and aborts at random moments; vLLM asserts the queue at every step."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    llm_engine = caching_engine.llm.llm_engine
    prompts = {f"any-{seed}-{i}": _any_prompt(rng, 1000 * seed + i) for i in range(14)}
    lengths = {name: rng.choice([1, 1, 3, 12]) for name in prompts}
    waiting, tokens, aborted = list(prompts), {}, set()

    def step() -> None:
        for output in llm_engine.step():
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)

    while waiting or llm_engine.has_unfinished_requests():
        if waiting and rng.random() < 0.25:
            name = waiting.pop()
            params = SamplingParams(max_tokens=lengths[name], temperature=0, ignore_eos=True)
            llm_engine.add_request(name, {"prompt_token_ids": prompts[name]}, params)
            if rng.random() < 0.15:
                step()
                llm_engine.abort_request([name])
                aborted.add(name)
        step()
    while caching_engine.core.batch_queue:
        caching_engine.core.step_fn()
    assert not caching_engine.scheduler.has_requests()
    assert set(tokens) >= set(prompts) - aborted
    for name in set(tokens) - aborted:
        (expected,) = caching_engine.generate([prompts[name]], fixed=True, max_tokens=lengths[name])
        assert tokens[name] == expected


def _any_prompt(rng: random.Random, seed: int) -> list[int]:
    return random_prompt(rng.choice([5, 300, 1500, 5000, 9000]), seed=50_000 + seed)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrent_batches": 3},  # async scheduling with the V2 runner keeps P + 1 itself
        {"data_parallel_size": 2},
        {"speculative_config": object()},
        {"aux_output": True},
        {"device": "cuda"},  # its runners rely on vLLM's depth
        {"spec": object()},
        {"groups": ()},  # a release that keeps them elsewhere
    ],
)
def test_left_as_it_is_where_another_depth_could_matter(
    caching_engine: Engine, changes: dict[str, Any]
) -> None:
    spec = caching_engine.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec

    def can_spare(**values: Any) -> bool:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=2, data_parallel_size=values.get("data_parallel_size", 1)
            ),
            max_concurrent_batches=values.get("max_concurrent_batches", 2),
            speculative_config=values.get("speculative_config"),
            aux_output_config=SimpleNamespace(enabled=values.get("aux_output", False)),
            device_config=SimpleNamespace(device_type=values.get("device", "cpu")),
        )
        group = SimpleNamespace(kv_cache_spec=values.get("spec", spec))
        scheduler = SimpleNamespace(
            vllm_config=config,
            kv_cache_config=SimpleNamespace(kv_cache_groups=values.get("groups", [group])),
        )
        return BatchQueue(scheduler, caching_engine.core).can_spare

    assert can_spare()
    assert not can_spare(**changes)
