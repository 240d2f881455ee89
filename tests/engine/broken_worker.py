"""A vLLM worker whose dummy forward fails on the last pipeline stage."""

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class BrokenWorker(CPUWorker):
    def load_model(self, *args: object, **kwargs: object) -> None:
        super().load_model(*args, **kwargs)
        if get_pp_group().is_last_rank:

            def broken_dummy_run(*args: object, **kwargs: object) -> None:
                raise RuntimeError("the dummy forward broke on purpose")

            self.model_runner._dummy_run = broken_dummy_run
