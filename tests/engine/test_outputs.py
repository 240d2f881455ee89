"""Greedy tokens don't depend on how prompts are split (float32)."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import Engine, random_prompt

NUM_PROMPTS = 50
NEW_TOKENS = 32


def mixed_prompts() -> list[list[int]]:
    rng = random.Random(0)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 6000]
    lengths += [int(2 ** rng.uniform(4, 11.5)) for _ in range(NUM_PROMPTS - len(lengths))]
    return [random_prompt(length, seed=100 + i) for i, length in enumerate(lengths)]


def run(engine: Engine, concurrency: int, fixed: bool) -> list[tuple[int, ...]]:
    prompts, tokens = mixed_prompts(), []
    for i in range(0, len(prompts), concurrency):
        batch = prompts[i : i + concurrency]
        tokens += engine.generate(batch, fixed=fixed, max_tokens=NEW_TOKENS)
    return tokens


@pytest.mark.parametrize("fixture", ["engine", "caching_engine"])
def test_tokens_equal_fixed_chunking(fixture: str, request: pytest.FixtureRequest) -> None:
    """With and without prefix caching, concurrency 1 and 8, and again: always the same."""
    engine: Engine = request.getfixturevalue(fixture)
    reset: Callable[[], Any] = engine.llm.reset_prefix_cache
    expected = run(engine, concurrency=1, fixed=True)
    assert len(expected) == NUM_PROMPTS
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert len({tokens[:8] for tokens in expected}) > NUM_PROMPTS * 0.8  # they do vary
    reset()
    alone = run(engine, concurrency=1, fixed=False)
    assert alone == expected
    reset()
    assert run(engine, concurrency=8, fixed=False) == expected
    # Without a reset: prefix-cache hits (where caching is on) change the splits once more.
    assert run(engine, concurrency=1, fixed=False) == alone
