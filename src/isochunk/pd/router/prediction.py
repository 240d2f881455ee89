"""How long a prefill takes, from the latency model that its server publishes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from isochunk.latency import InvalidLatencyModelError, LatencyModel
from isochunk.pd.router.request import PromptSize

MODEL_METRIC = "isochunk_latency_model"


def read_models(metrics: Iterable[str]) -> tuple[LatencyModel, ...]:
    """The models of a server's stages from the lines of its /metrics; empty without any.

    The gauge has the labels ``stage`` and ``coefficient`` (c, gamma, b, a) and is in ms.
    """
    lines = [line for line in metrics if line.startswith(MODEL_METRIC + "{")]
    stages: defaultdict[str, dict[str, float]] = defaultdict(dict)
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                stages[sample.labels["stage"]][sample.labels["coefficient"]] = sample.value
        return tuple(LatencyModel.from_letters(stages[stage]) for stage in sorted(stages))
    except (KeyError, TypeError, ValueError, InvalidLatencyModelError):
        return ()


def prefill_ms(stages: tuple[LatencyModel, ...], num_tokens: float) -> float:
    """How long a prompt keeps the slowest stage busy [ms].

    ``S + K·(c + γN/2)`` with ``S = bN + aN²`` and the number of equal-time chunks that
    gives the shortest prefill on P stages, ``K = sqrt((P − 1)·S / (c + γN/2))``, at
    least 1.
    """
    return max(_stage_ms(stage, len(stages), num_tokens) for stage in stages)


def _stage_ms(model: LatencyModel, num_stages: int, num_tokens: float) -> float:
    work_ms = model.token_ms * num_tokens + model.attention_ms * num_tokens**2
    chunk_ms = model.fixed_ms + model.prefix_ms * num_tokens / 2
    num_chunks = math.sqrt((num_stages - 1) * work_ms / chunk_ms) if chunk_ms > 0 else 0.0
    return work_ms + max(1.0, num_chunks) * chunk_ms


@dataclass
class TokenEstimate:
    """Tokens per character, learned from answers.

    Starts at 1 token per 4 characters, the usual figure for English.
    """

    tokens_per_character: float = 0.25
    _weight: float = field(default=0.1, repr=False)

    def num_tokens(self, prompt: PromptSize) -> float:
        """Exact for token ids."""
        return prompt.num_tokens + prompt.num_characters * self.tokens_per_character

    def learn(self, prompt: PromptSize, num_tokens: int) -> None:
        """A prompt turned out to have ``num_tokens``."""
        if prompt.num_characters > 0 and num_tokens > prompt.num_tokens:
            seen = (num_tokens - prompt.num_tokens) / prompt.num_characters
            self.tokens_per_character += self._weight * (seen - self.tokens_per_character)
