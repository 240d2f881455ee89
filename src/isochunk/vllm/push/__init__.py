"""A KV connector for stock vLLM: pipeline-parallel prefill to decode over TCP."""
