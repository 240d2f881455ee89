"""Whatever is in the way: one clear reason, fixed chunks, a working engine."""

import logging
import time
from typing import Any

import pytest

from tests.engine.conftest import random_prompt
from tests.engine.worker_checks import leftovers, num_layers


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Captures what the package logs through vLLM's handlers."""
    import vllm.logger  # noqa: F401  (sets them up)

    logger = logging.getLogger("isochunk")

    class Records(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage())

        def about_chunking(self) -> list[str]:
            return [m for m in self.messages if m.startswith("Dynamic chunking")]

    records = Records()
    handlers = logging.getLogger("vllm").handlers
    handlers.append(records)
    yield records
    handlers.remove(records)
    assert logger.handlers is handlers


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
    make_engine: Any, vllm_log: Any, settings: dict, options: dict, reason: str
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
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, vllm_log: Any
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,3")
    with make_engine(max_num_seqs=1) as engine:
        assert engine.core.model_executor.collective_rpc(num_layers) == [5, 3]
        engine.calibrate(6144)
        large, small = engine.controller.models
        ratio = large.predict_ms(4096, 512) / small.predict_ms(4096, 512)
        assert 1.25 < ratio < 2.2  # 5 / 3 and what doesn't depend on layers
        assert engine.controller.policy.model == large
        installed = [m for m in vllm_log.about_chunking() if "installed" in m]
        assert len(installed) == 2
        assert "stage 0 of 2 (the slowest)" in installed[0]


def test_fault_of_ours_leaves_the_engine_running(make_engine: Any, vllm_log: Any) -> None:
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
