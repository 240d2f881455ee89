"""Cost of deciding a step with 256 requests queued: ``python -m bench.decide_step``."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from dataclasses import replace

from bench.models import deepseek_like
from isochunk.chunk_plan import plan_chunks
from isochunk.pipeline import simulate
from isochunk.policies import Prefill, Step
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.workload import ClosedLoop, Request

NUM_QUEUED = 256
NUM_STEPS = 10_000
NUM_RUNS = 5
BUDGET = 8192
ALIGNMENT = 64


def measure(num_stages: int, change_every: int, rng: random.Random) -> list[float]:
    """Microseconds per step: ``begin_step``, every ``size`` until the step is full, feedback.

    The head advances as an engine would; every ``change_every`` steps a prompt leaves from
    the front or comes at the end, and the policy has to look at the set again.
    """
    policy = ShortestTTFT(deepseek_like(num_stages, 50.0, 0.0), BUDGET, ALIGNMENT)
    queue = [
        Prefill(f"request-{i}", 0, int(4096 * 2 ** rng.uniform(0, 5))) for i in range(NUM_QUEUED)
    ]
    num_running = 1
    micros = []
    gc.collect()
    gc.freeze()  # as vLLM's engine core does after its start
    for index in range(NUM_STEPS):
        if index % change_every == change_every - 1:
            length = int(4096 * 2 ** rng.uniform(0, 5))
            queue = [*queue[1:], Prefill(f"request-{NUM_QUEUED + index}", 0, length)]
            num_running = max(num_running - 1, 0)
        step = Step(queue, 8, num_running)
        start = time.perf_counter_ns()
        policy.begin_step(step)
        sizes = []
        left = BUDGET - 8
        for position, prefill in enumerate(queue):
            new = policy.size(prefill, min(prefill.num_remaining, left)).num_tokens
            sizes.append(new)
            left -= new
            if left == 0 or (new == 0 and position >= num_running):
                break
        policy.feedback.completed(index + 0.5)
        policy.feedback.scheduled(float(index), None)
        micros.append((time.perf_counter_ns() - start) / 1000.0)
        for position, new in enumerate(sizes):
            prefill = queue[position]
            rest = prefill.num_remaining - new
            # A finished prompt starts over, so that the queue stays at 256.
            queue[position] = (
                Prefill(prefill.request_id, prefill.num_cached + new, rest)
                if rest
                else Prefill(prefill.request_id, 0, prefill.num_cached + new)
            )
            num_running = max(num_running, position + (new > 0))
        num_running = min(num_running, 8)
    gc.unfreeze()
    return micros


class Noting(ShortestTTFT):
    """Takes notes of completions and doesn't digest them by itself."""

    def begin_step(self, step: Step) -> None:
        if step.num_sources:
            super().begin_step(step)


def learning_ms(num_stages: int, num_tokens: int) -> tuple[int, float, float]:
    """Chunks of a prompt; least time to learn from it; least time to plan it."""
    pipeline = deepseek_like(num_stages, 50.0, 0.05)
    model = pipeline.stages[0]
    learning, planning = [], []
    for _ in range(NUM_RUNS):
        wrong = replace(model, attention_ms=1.3 * model.attention_ms)
        policy = Noting(replace(pipeline, stages=(wrong,) * num_stages), BUDGET, ALIGNMENT)
        simulate(pipeline, policy, ClosedLoop([Request(num_tokens)], 1), BUDGET)
        plan_chunks.cache_clear()
        start = time.perf_counter()
        policy.feedback.learn()
        learnt = time.perf_counter()
        plan = plan_chunks(policy.feedback.pipeline, 0, num_tokens, BUDGET, ALIGNMENT)
        learning.append(1e3 * (learnt - start))
        planning.append(1e3 * (time.perf_counter() - learnt))
    return len(plan.ends), min(learning), min(planning)


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[int(percent / 100 * len(values))]


def main() -> None:
    """Print percentiles by number of stages and rate of change of the prompt set."""
    print(
        f"Deciding a step, {NUM_QUEUED} queued prompts, {NUM_STEPS} steps, {NUM_RUNS} identical\n"
        "runs; microseconds. 'raw': all runs, with whatever else the machine did in between;\n"
        "'p99': each step's fastest run, which is what the decision itself costs."
    )
    print(f"{'P':>3} {'set changes':>12} {'median':>8} {'p99':>8} {'raw p99':>8}")
    for num_stages in (2, 4, 8):
        for change_every in (200, 20, 5):
            runs = [measure(num_stages, change_every, random.Random(1)) for _ in range(NUM_RUNS)]
            fastest = [min(times) for times in zip(*runs, strict=True)]
            raw = [time_us for run in runs for time_us in run]
            print(
                f"{num_stages:>3} {'1 in ' + str(change_every):>12} "
                f"{statistics.median(fastest):>8.1f} {percentile(fastest, 99):>8.1f} "
                f"{percentile(raw, 99):>8.1f}"
            )
    print(
        "\nOnce per sole prompt: learning from its completions, with a wrong model, mostly while\n"
        "its last chunks run; planning, at the first step of a prompt of a new shape.\n"
        f"Milliseconds, fastest of {NUM_RUNS}"
    )
    print(f"{'P':>3} {'tokens':>12} {'chunks':>8} {'learn':>8} {'plan':>8}")
    for num_stages, num_tokens in itertools.product((2, 8), (8192, 32768, 131072)):
        chunks, learn, plan = learning_ms(num_stages, num_tokens)
        print(f"{num_stages:>3} {num_tokens:>12} {chunks:>8} {learn:>8.1f} {plan:>8.1f}")


if __name__ == "__main__":
    main()
