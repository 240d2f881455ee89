"""The chunk latency model: how long one pipeline stage takes for one prefill chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

LETTERS = {"fixed_ms": "c", "prefix_ms": "gamma", "token_ms": "b", "attention_ms": "a"}
"""The coefficients' letters in ``t(L, x) = c + γL + bx + a(2Lx + x²)``, as metrics label them."""


class InvalidLatencyModelError(ValueError):
    """A coefficient is negative, infinite or not a number, or all of them are zero."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Latency of a chunk of ``x`` new tokens after ``L`` cached ones, on one stage.

    ``t(L, x) = c + γ·L + b·x + a·(2·L·x + x²)`` in milliseconds. The form is that of
    ATOM's guide "Dynamic Chunked Pipeline Parallel" (ROCm documentation); the special
    case c = γ = 0 is the one that SGLang and vLLM-Ascend solve.

    Raises:
        InvalidLatencyModelError: a coefficient is negative or not finite, or all are zero.
    """

    fixed_ms: float
    """``c`` [ms]: cost of a forward whatever its size."""
    prefix_ms: float
    """``γ`` [ms/token]: cost per chunk that grows with the cached prefix (MLA)."""
    token_ms: float
    """``b`` [ms/token]: work per new token that doesn't depend on the prefix."""
    attention_ms: float
    """``a`` [ms/token²]: self-attention cost per unit of area ``2·L·x + x²``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidLatencyModelError(
                    f"{field.name}={value!r} is not a finite number >= 0"
                )
        if self.fixed_ms + self.prefix_ms + self.token_ms + self.attention_ms == 0:
            raise InvalidLatencyModelError("all coefficients are 0")

    @classmethod
    def from_letters(cls, values: Mapping[str, float]) -> LatencyModel:
        """From values by letter (c, gamma, b, a).

        Raises:
            KeyError: a letter is unknown.
            TypeError: one is missing.
            InvalidLatencyModelError: a coefficient is not valid.
        """
        names = {letter: name for name, letter in LETTERS.items()}
        return cls(**{names[letter]: value for letter, value in values.items()})

    def predict_ms(self, num_cached: float, num_new: float) -> float:
        """Latency [ms] of ``num_new`` tokens after ``num_cached`` cached ones."""
        return (
            self.fixed_ms
            + self.prefix_ms * num_cached
            + self.token_ms * num_new
            + self.attention_ms * num_new * (2.0 * num_cached + num_new)
        )

    def solve_num_new(self, target_ms: float, num_cached: float) -> float:
        """The exact inverse: how many new tokens take ``target_ms`` after ``num_cached``.

        Returns:
            A real number of tokens ≥ 0; 0 where even an empty chunk takes ``target_ms``
            or longer; infinity where the model doesn't grow with the number of tokens.
        """
        available_ms = target_ms - self.fixed_ms - self.prefix_ms * num_cached
        if not available_ms > 0:
            return 0.0
        slope = self.token_ms + 2.0 * self.attention_ms * num_cached
        # Rationalised root of a·x² + slope·x = available: no cancellation for small a,
        # and a = 0 needs no case of its own.
        root = math.sqrt(slope * slope + 4.0 * self.attention_ms * available_ms)
        if slope + root == 0:
            return math.inf
        return 2.0 * available_ms / (slope + root)

    def __str__(self) -> str:
        return (
            f"t(L, x) = {self.fixed_ms:.4g} + {self.prefix_ms:.4g}·L + {self.token_ms:.4g}·x"
            f" + {self.attention_ms:.4g}·(2Lx + x²) ms"
        )
