"""Stage models for the simulations, with where their numbers come from."""

from __future__ import annotations

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline

# vLLM-Ascend publishes for DeepSeek-V3.1, 128K tokens, PP2: 27.0 s with fixed 32K chunks and
# 22.5 s with dynamic ones. With u = b·32K and v = a·(32K)² on one of two stages and c ≈ 0.1 s,
# Σt + max t gives 5u + 23v + 5c = 27.0 s for four fixed chunks and, at about the same number of
# equal-time chunks, 5u + 17v + 5c = 22.5 s. So v ≈ 0.8 s and u ≈ 1.6 s.
REFERENCE_CHUNK = 32 * 1024
REFERENCE_STAGES = 2
LINEAR_MS = 1600.0
ATTENTION_MS = 800.0
MLA_PREFIX_SHARE = 0.05
"""γ/b of an MLA model: rebuilding K and V of a cached token costs ~3 % of its forward in FLOPs
(kv_b_proj against 37 B active parameters over 61 layers), and memory traffic on top."""


def deepseek_like(num_stages: int, fixed_ms: float, prefix_share: float) -> Pipeline:
    """Equal stages; work per stage shrinks with their number, the fixed cost does not."""
    scale = REFERENCE_STAGES / num_stages
    token_ms = LINEAR_MS / REFERENCE_CHUNK * scale
    attention_ms = ATTENTION_MS / REFERENCE_CHUNK**2 * scale
    model = LatencyModel(fixed_ms, prefix_share * token_ms, token_ms, attention_ms)
    return Pipeline((model,) * num_stages)


def by_attention_share(
    num_stages: int, share: float, fixed_ms: float, prefix_share: float
) -> Pipeline:
    """Equal stages with the reference's time at 128K, ``share`` of it attention."""
    total_ms = (4 * LINEAR_MS + 16 * ATTENTION_MS) * REFERENCE_STAGES / num_stages
    tokens = 4 * REFERENCE_CHUNK
    token_ms = total_ms * (1 - share) / tokens
    attention_ms = total_ms * share / tokens**2
    model = LatencyModel(fixed_ms, prefix_share * token_ms, token_ms, attention_ms)
    return Pipeline((model,) * num_stages)
