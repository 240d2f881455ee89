"""The adapter for vLLM: the only place that imports it.

Use ``isochunk serve``, or ``--scheduler-cls isochunk.vllm.scheduler.DynamicChunkingScheduler``.
"""
