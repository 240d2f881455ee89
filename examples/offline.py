"""Dynamic chunking with vLLM's offline API. Usage: python examples/offline.py MODEL [STAGES]."""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1]
    num_stages = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    llm = LLM(
        model=model,
        pipeline_parallel_size=num_stages,
        max_num_batched_tokens=2048,  # small, so that 4000 tokens are several chunks
        scheduler_cls="isochunk.vllm.scheduler.DynamicChunkingScheduler",
        additional_config={"isochunk": {"enabled": True}},
    )
    text = "The quick brown fox jumps over the lazy dog. " * 400
    # The first long prompts calibrate; the log then says that the model is installed.
    for number in range(5):
        (output,) = llm.generate(f"{number}. {text}", SamplingParams(max_tokens=16, temperature=0))
        print(number, repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
