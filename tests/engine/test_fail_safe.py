"""Whatever is in the way: one clear reason, fixed chunks, a working engine."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import random_prompt
from tests.engine.worker_checks import leftovers, num_layers


class Records:
    """What the package logs."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def about_chunking(self) -> list[str]:
        return [m for m in self.messages if m.startswith("Dynamic chunking")]


@pytest.fixture
def vllm_log() -> Iterator[Records]:
    """Takes notes as records are made: vLLM sets up its handlers anew when it starts."""
    records, make_record = Records(), logging.getLogRecordFactory()

    def noting_factory(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(name, *args, **kwargs)
        if name.partition(".")[0] == "isochunk":
            records.messages.append(record.getMessage())
        return record

    logging.setLogRecordFactory(noting_factory)
    yield records
    logging.setLogRecordFactory(make_record)
    # It comes out where vLLM's own lines do.
    assert logging.getLogger("isochunk").handlers is logging.getLogger("vllm").handlers


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({}, {"pipeline_parallel_size": 1}, "pipeline_parallel_size=1"),
        (
            {"min_chunk_size": 1024},
            {},
            "min_chunk_size=1024 is not below max_num_batched_tokens=1024",
        ),
        ({"policy": "fixed"}, {}, "policy=fixed asks for them"),
    ],
)
def test_keeps_fixed_chunks_and_says_why(
    make_engine: Any, vllm_log: Records, settings: dict, options: dict, reason: str
) -> None:
    with make_engine(settings, **options) as engine:
        assert engine.scheduler._adapter is None
        (message,) = vllm_log.about_chunking()
        assert reason in message
        assert not any(engine.core.model_executor.collective_rpc(leftovers))
        assert len(engine.generate([random_prompt(3000, seed=1)], max_tokens=3)[0]) == 3


def test_raising_sweep_fails_startup_with_that_error(make_engine: Any) -> None:
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="the dummy forward broke on purpose"),
        make_engine(worker_cls="tests.engine.broken_worker.BrokenWorker"),
    ):
        pass
    assert time.monotonic() - start < 120  # startup itself included: no hang


def test_uneven_partition_shows_in_the_stage_models(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, vllm_log: Records
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,3")
    with make_engine(max_num_seqs=1) as engine:
        assert engine.core.model_executor.collective_rpc(num_layers) == [5, 3]
        engine.calibrate(6144)
        large, small = engine.controller.models
        ratio = large.predict_ms(4096, 512) / small.predict_ms(4096, 512)
        # 5 / 3 and what doesn't depend on layers; wide, for a machine with other things to do.
        assert 1.1 < ratio < 2.6
        assert engine.controller.policy.model == large
        installed = [m for m in vllm_log.about_chunking() if "installed" in m]
        assert len(installed) == 2
        assert "stage 0 of 2 (the slowest)" in installed[0]


def test_fault_of_ours_leaves_the_engine_running(make_engine: Any, vllm_log: Records) -> None:
    """Whatever breaks in sizing, timing or fitting: logged once, then stock chunking."""
    with make_engine() as engine:
        expected = engine.generate([random_prompt(4000, seed=2)], fixed=True, max_tokens=4)

        def broken(*args: object) -> int:
            raise MemoryError("on purpose")

        engine.controller.size = broken
        assert engine.generate([random_prompt(4000, seed=2)], max_tokens=4) == expected
        assert engine.scheduler._adapter is None
        failed = [m for m in vllm_log.about_chunking() if "failed" in m]
        assert len(failed) == 1
        assert all(
            queue._spin_condition.busy_loop_s == 1
            for queue in engine.core.model_executor.response_mqs
        )
