"""The patched queue under vLLM's own step function, whatever the scheduler wants and when."""

import random
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from isochunk.vllm.batch_queue import BatchQueue


class Core:
    """What ``EngineCore.step_with_batch_queue`` uses; it is scheduler and executor as well."""

    is_mm_encoder_only = is_pooling_model = check_for_draft_tokens = False

    def __init__(self, num_stages: int, rng: random.Random) -> None:
        self.num_stages, self.rng = num_stages, rng
        self.batch_queue: deque[Any] = deque(maxlen=num_stages)
        self.batch_queue_size = num_stages
        self.scheduler = self.model_executor = self
        self.is_wanted = self.is_over = False
        self.scheduled: list[int] = []
        self.updated: list[int] = []
        self.depths: list[int] = []
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=num_stages, data_parallel_size=1
            ),
            device_config=SimpleNamespace(device_type="cpu"),
            max_concurrent_batches=num_stages,
            speculative_config=None,
        )
        spec = type("FullAttentionSpec", (), {})()
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        scheduler = SimpleNamespace(vllm_config=config, kv_cache_config=cache)
        self.queue = BatchQueue(scheduler, self)
        assert self.queue.can_spare

    # The scheduler.

    def has_requests(self) -> bool:
        return not self.is_over and not self.queue.must_shrink

    def schedule(self, _: bool) -> Any:
        number = len(self.scheduled)
        self.scheduled.append(number)
        self.queue.set_spare(self.is_wanted)
        self.depths.append(len(self.batch_queue) + 1)
        # Structured output waits for the batch before, of which there is one then.
        is_deferred = bool(self.batch_queue) and self.rng.random() < 0.2
        return SimpleNamespace(
            number=number,
            total_num_scheduled_tokens=self.rng.choice([0, 1, 100]),
            pending_structured_output_tokens=is_deferred,
        )

    def get_grammar_bitmask(self, output: Any) -> Any:
        return output.number

    def update_from_output(self, output: Any, result: int) -> list[int]:
        assert output.number == result
        self.updated.append(result)
        return [result]

    # The executor.

    def execute_model(self, output: Any, non_block: bool) -> Any:
        return SimpleNamespace(result=lambda: output.number)

    def sample_tokens(self, number: int, non_block: bool) -> Any:
        return SimpleNamespace(result=lambda: number)

    # The rest of EngineCore.

    def _should_throttle_prefills(self) -> bool:
        return False

    def log_error_detail(self, output: Any) -> Any:
        return nullcontext()

    capture_iteration_details = log_error_detail

    def _nothing(self, *_: Any) -> None:
        pass

    _process_aborts_queue = _attach_iteration_details = _attach_weight_version = _nothing


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_batch_is_lost_and_the_depth_goes_back(num_stages: int) -> None:
    deepest = 0
    for seed in range(300):
        rng = random.Random(seed)
        core = Core(num_stages, rng)
        ready_at = rng.randrange(6)
        for i in range(60):
            if i == ready_at:
                core.queue.make_room()
            if rng.random() < 0.3:
                core.is_wanted = not core.is_wanted
            EngineCore.step_with_batch_queue(core)  # asserts that the queue has room
        deepest = max(deepest, *core.depths)
        core.is_wanted = False
        core.depths.clear()
        for _ in range(12):
            EngineCore.step_with_batch_queue(core)
        assert core.batch_queue_size == num_stages
        assert max(core.depths[-4:]) <= num_stages
        core.is_over = True
        while core.batch_queue:
            EngineCore.step_with_batch_queue(core)
        assert core.updated == core.scheduled  # all of them, in order
    assert deepest == num_stages + 1
