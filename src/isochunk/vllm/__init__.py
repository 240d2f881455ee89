"""The adapter for vLLM: the only place that imports it."""
