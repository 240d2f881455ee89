"""Equal-latency chunks on the real engine: how equal they are, and how well they are predicted.

``python -m bench.chunk_times [--budget 4096] [--prompt-tokens 16384] [--prompts 5]
[--block-size 128]``: the toy model on two CPU stages, smoothing 1.0; fixed chunks of the same
budget beside it.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from isochunk.benchmark.engine import BenchEngine
from isochunk.demo.models import make_toy_model
from isochunk.demo.prompts import random_prompt
from isochunk.timings import read_trace


def spread(times_ms: list[float]) -> float:
    """Longest over shortest chunk of a prompt on a stage, the last chunk aside."""
    return max(times_ms[:-1]) / min(times_ms[:-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=128, help="KV block: chunk alignment")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_toy_model(Path(folder) / "toy")
        trace = Path(folder) / "trace.jsonl"
        engine = BenchEngine(
            model,
            {
                "policy": "equal-latency",
                "smooth_factor": 1.0,
                "min_chunk_size": 128,
                "trace_file": str(trace),
            },
            {
                "pipeline_parallel_size": 2,
                "max_num_batched_tokens": args.budget,
                "max_model_len": args.prompt_tokens + 64,
                "dtype": "float32",
                "enforce_eager": True,
                "block_size": args.block_size,
            },
        )
        try:
            num_calibration = engine.calibrate(args.prompt_tokens)
            skip = len(read_trace(trace))
            for seed in range(args.prompts):
                for policy in (f"fixed:{args.budget}", "equal-latency"):
                    engine.use(policy)
                    engine.run([random_prompt(args.prompt_tokens, seed)], concurrency=1)
            models = engine.controller.models
        finally:
            engine.close()
        lines = read_trace(trace)[skip:]
    by_prompt: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
    errors = []
    for line in lines:
        (piece,) = line["pieces"]
        key = (piece["reason"], piece["request_id"], line["stage"])
        by_prompt[key].append((piece["num_cached"], line["latency_ms"]))
        if piece["reason"] == "model":
            errors.append(abs(line["predicted_ms"] / line["latency_ms"] - 1))
    print(
        f"budget {args.budget}, {args.prompt_tokens} tokens, {args.prompts} prompts each, "
        f"chunk ends aligned to {args.block_size}"
    )
    print(f"installed after {num_calibration} prompts")
    for stage, fitted in enumerate(models):
        print(f"  stage {stage}: {fitted}")
    for reason, name in (("fixed", "fixed"), ("model", "equal-latency")):
        spreads = [
            spread([ms for _, ms in sorted(chunks)])
            for key, chunks in by_prompt.items()
            if key[0] == reason
        ]
        print(
            f"{name}: chunk time spread per prompt and stage: median {median(spreads):.2f}, "
            f"min {min(spreads):.2f}, max {max(spreads):.2f}"
        )
    print(
        f"predicted chunk times: error median {median(errors):.1%}, max {max(errors):.1%} "
        f"({len(errors)} chunks)"
    )


if __name__ == "__main__":
    main()
