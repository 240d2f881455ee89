"""One in-process vLLM engine that runs every policy, so that comparisons are side by side.

Between runs the engine is idle, and only the scheduler's budget and policy are switched: a
fixed size F is exactly what stock vLLM does with ``max_num_batched_tokens = F``.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isochunk.controller import ChunkController
from isochunk.demo.prompts import random_prompt
from isochunk.demo.server import cpu_env
from isochunk.feedback import believed_by
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkPolicy

MAX_CALIBRATION_PROMPTS = 12


class BenchError(RuntimeError):
    """The engine can't run the comparison; the message says why."""


@dataclass(frozen=True)
class LoopResult:
    """A closed loop: TTFT of each request [s], in order of submission, and the whole time [s]."""

    ttfts_s: tuple[float, ...]
    elapsed_s: float


class BenchEngine:
    """vLLM with two or more pipeline stages and dynamic chunking, engine core in-process.

    Args:
        model: model directory or hub name.
        settings: of dynamic chunking, as in ``additional_config={"isochunk": ...}``.
        options: further arguments of ``vllm.LLM``.
    """

    def __init__(
        self, model: Path | str, settings: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        num_stages = int(options.get("pipeline_parallel_size", 2))
        os.environ.update(
            cpu_env(num_stages, kv_cache_gib=2) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        )
        from vllm import LLM  # noqa: PLC0415  (reads the environment)

        own = {"enabled": True, **settings}
        self._llm = LLM(
            model=str(model),
            enable_prefix_caching=False,
            scheduler_cls="isochunk.vllm.scheduler.DynamicChunkingScheduler",
            additional_config={"isochunk": own},
            **options,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._next_id = 0
        self._policies: dict[str, ChunkPolicy] = {}
        if self._scheduler._adapter is None:
            self.close()
            raise BenchError("dynamic chunking is off on this engine; the log says why")
        self.budget: int = self._scheduler.max_num_scheduled_tokens
        self.controller: ChunkController = self._scheduler._adapter.controller

    def calibrate(self, num_tokens: int) -> int:
        """Single prompts until the model is installed; returns their number.

        Raises:
            BenchError: the calibration gave up or took too long.
        """
        for i in range(MAX_CALIBRATION_PROMPTS):
            self.run([random_prompt(num_tokens, seed=10_000 + i)], concurrency=1)
            if self._scheduler._adapter is None:
                raise BenchError(f"calibration gave up: {self.controller.calibrator.reason}")
            if self.controller.models:
                return i + 1
        raise BenchError(f"no model after {MAX_CALIBRATION_PROMPTS} prompts of {num_tokens} tokens")

    def use(self, policy: str) -> None:
        """Switch to "fixed:N", "equal-latency" or "auto"; only while idle.

        Each keeps what it has learnt from its own prompts, as on a server of its own.
        """
        name, _, size = policy.partition(":")
        self._scheduler.max_num_scheduled_tokens = int(size) if size else self.budget
        if policy not in self._policies:
            self._policies[policy] = self.controller.make_policy(name)
        self.controller.policy = self._policies[policy]

    @property
    def pipeline(self) -> Pipeline:
        """The models, as corrected by what "auto" has learnt."""
        return believed_by(self._policies.get("auto"), self.controller.pipeline)

    def run(
        self, prompts: Sequence[list[int]], concurrency: int, max_tokens: int = 1
    ) -> LoopResult:
        """Closed loop: ``concurrency`` requests at a time until all prompts are done."""
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        waiting = deque(enumerate(prompts))
        started: dict[str, tuple[int, float]] = {}
        ttfts: dict[int, float] = {}
        begin = time.monotonic()
        num_active = 0
        while waiting or num_active:
            while waiting and num_active < concurrency:
                index, prompt = waiting.popleft()
                request_id, self._next_id = f"bench-{self._next_id}", self._next_id + 1
                started[request_id] = (index, time.monotonic())
                self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
                num_active += 1
            for output in self._engine.step():
                index, start = started[output.request_id]
                if output.outputs and output.outputs[0].token_ids:
                    ttfts.setdefault(index, time.monotonic() - start)
                num_active -= output.finished
        elapsed = time.monotonic() - begin
        return LoopResult(tuple(ttfts[i] for i in range(len(prompts))), elapsed)

    def close(self) -> None:
        """Stop the workers."""
        self._engine.engine_core.shutdown()
