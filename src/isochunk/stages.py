"""Which of a pipeline's stages count: they differ in layers, embedding and lm_head."""

from __future__ import annotations

from collections.abc import Sequence

from isochunk.latency import LatencyModel


def dominant_stages(stages: Sequence[LatencyModel]) -> list[LatencyModel]:
    """The stages that can be the slowest for some chunk: one for equal stages.

    Left out is every stage that no coefficient of which exceeds another stage's.
    """
    unique = list(dict.fromkeys(stages))
    return [
        stage
        for stage in unique
        if not any(
            other != stage
            and other.fixed_ms >= stage.fixed_ms
            and other.prefix_ms >= stage.prefix_ms
            and other.token_ms >= stage.token_ms
            and other.attention_ms >= stage.attention_ms
            for other in unique
        )
    ]


def slowest_stage(models: Sequence[LatencyModel], num_cached: int, num_new: int) -> int:
    """Index of the stage that takes longest for such a chunk: it paces the pipeline."""
    times = [model.predict_ms(num_cached, num_new) for model in models]
    return times.index(max(times))


def useful_shrink(models: Sequence[LatencyModel], budget: int, max_model_len: int) -> float:
    """By what fraction the deepest equal-latency chunk is smaller than the initial one."""
    deepest = max(max_model_len - budget, 0)
    model = models[slowest_stage(models, deepest // 2, budget)]
    solved = model.solve_num_new(model.predict_ms(0, budget), deepest)
    return 1.0 - min(solved, budget) / budget
