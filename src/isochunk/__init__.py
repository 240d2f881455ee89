"""Dynamic Chunked Pipeline Parallel: prefill chunks sized so that the pipeline stays full.

The modules at this level are the engine-agnostic core; ``isochunk.vllm`` is the adapter
for vLLM.
"""

from isochunk.config import ConfigError, DynamicChunkingConfig
from isochunk.fitting import ChunkSample, FitReport, fit_latency_model
from isochunk.latency import InvalidLatencyModelError, LatencyModel
from isochunk.policies import ChunkDecision, ChunkReason, EqualLatency, FixedChunk, Prefill

__version__ = "0.1.0"

__all__ = [
    "ChunkDecision",
    "ChunkReason",
    "ChunkSample",
    "ConfigError",
    "DynamicChunkingConfig",
    "EqualLatency",
    "FitReport",
    "FixedChunk",
    "InvalidLatencyModelError",
    "LatencyModel",
    "Prefill",
    "fit_latency_model",
]
