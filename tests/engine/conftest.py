"""Real vLLM engines on the CPU: two pipeline stages on two cores, the engine core in-process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# Before vLLM is imported. In-process, so that tests see the scheduler of the real engine.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="|".join(
        str(core) for core in (sorted(os.sched_getaffinity(0)) * 2)[:2]
    ),
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

SCHEDULER_CLS = "isochunk.vllm.scheduler.DynamicChunkingScheduler"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose greedy tokens vary with the prompt."""
    from isochunk.demo.models import make_toy_model

    return make_toy_model(tmp_path_factory.mktemp("models") / "toy", distinct_tokens=True)


class Engine:
    """An offline LLM and a way to its scheduler."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def controller(self) -> Any:
        return self.scheduler._adapter.controller

    def generate(
        self, prompts: list[list[int]], *, fixed: bool = False, max_tokens: int = 1
    ) -> list[tuple[int, ...]]:
        """Greedy tokens of all prompts, run concurrently."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"isochunk_fixed_chunk": 0} if fixed else None,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def calibrate(self, num_tokens: int, max_prompts: int = 15) -> int:
        """Single prompts until the model is installed; returns how many it took."""
        for i in range(max_prompts):
            self.generate([random_prompt(num_tokens, seed=900 + i)])
            assert self.scheduler._adapter is not None, "the calibration was given up"
            if self.controller.models:
                return i + 1
        reports = "; ".join(str(r) for r in self.controller.calibrator.reports)
        raise AssertionError(f"no model after {max_prompts} prompts: {reports}")

    def trace(self) -> "ChunkLog":
        return ChunkLog(self)


class ChunkLog:
    """Records the chunks that steps really scheduled: (request, cached, new, reason)."""

    def __init__(self, engine: Engine) -> None:
        self._controller = engine.controller
        self.chunks: list[tuple[str, int, int, str]] = []

    def __enter__(self) -> "ChunkLog":
        end_step = self._controller.end_step

        def recording_end_step(scheduled: dict[str, int]) -> int | None:
            for request_id, (prefill, decision) in self._controller._decisions.items():
                if request_id in scheduled:
                    self.chunks.append(
                        (request_id, prefill.num_cached, scheduled[request_id], decision.reason)
                    )
            return end_step(scheduled)

        self._controller.end_step = recording_end_step
        return self

    def __exit__(self, *_: object) -> None:
        del self._controller.end_step

    def of(self, request_id: str) -> list[tuple[int, int, str]]:
        return [chunk[1:] for chunk in self.chunks if chunk[0] == request_id]


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    from isochunk.demo.prompts import random_prompt as make

    return make(num_tokens, seed)


@pytest.fixture(scope="session")
def make_engine(toy: Path) -> Callable[..., Any]:
    """A context manager that builds an engine, by default with dynamic chunking on."""

    @contextmanager
    def make(settings: dict[str, Any] | None = None, **kwargs: Any) -> Iterator[Engine]:
        from vllm import LLM

        own = {"enabled": True, "policy": "equal-latency", "smooth_factor": 1.0}
        own |= {"min_chunk_size": 128}
        # Test machines may be busy: more samples than by default, and noisier ones.
        own |= {"max_calibration_samples": 90, "max_fit_error": 0.25}
        own |= {"allow_request_override": True} | (settings or {})
        options = {
            "model": str(toy),
            "pipeline_parallel_size": 2,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 24576,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "scheduler_cls": SCHEDULER_CLS,
            "additional_config": {"isochunk": own},
        }
        engine = Engine(LLM(**(options | kwargs)))
        try:
            yield engine
        finally:
            engine.llm.llm_engine.engine_core.shutdown()

    return make


@pytest.fixture(scope="session")
def engine(make_engine: Callable[..., Any]) -> Iterator[Engine]:
    """A shared engine with the equal-latency policy, without prefix caching, calibrated."""
    with make_engine() as made:
        made.calibrate(6144)
        yield made


@pytest.fixture(scope="session")
def caching_engine(make_engine: Callable[..., Any]) -> Iterator[Engine]:
    """A shared engine with the default policy (auto) and prefix caching, calibrated."""
    with make_engine({"policy": "auto"}, enable_prefix_caching=True) as made:
        made.calibrate(6144)
        yield made
