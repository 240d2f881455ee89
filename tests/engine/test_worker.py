"""The worker functions on small runners: what a CPU engine here doesn't show."""

from types import SimpleNamespace

import torch
from torch import nn

from isochunk.vllm import worker


class V2LikeRunner:
    """Like model runner V2: a dummy run goes through ``execute_model``."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)

    def get_model(self) -> nn.Module:
        return self.model

    def execute_model(self, scheduler_output: object) -> torch.Tensor:
        return self.model(torch.zeros(1, 4))

    def _dummy_run(self, num_tokens: int, is_profile: bool = False) -> torch.Tensor:
        return self.execute_model(SimpleNamespace())


def test_sweep_times_dummy_runs_that_go_through_execute_model() -> None:
    runner = V2LikeRunner()
    target = SimpleNamespace(model_runner=runner)
    assert worker.install(target) is None
    timings = worker._sweep(runner, (64, 128))
    assert [size for size, _ in timings] == [64, 128]
    runner.execute_model(SimpleNamespace(isochunk_tag=5))
    runner.execute_model(SimpleNamespace())
    assert [timing.tag for timing in runner._isochunk_timer.drain()] == [5]
    worker.uninstall(target)
    assert "execute_model" not in vars(runner)
    assert not runner.model._forward_hooks


def test_models_that_bypass_hooks_are_refused() -> None:
    class Compiled(nn.Linear):
        def __call__(self, *args: object) -> None:
            return None

    runner = V2LikeRunner()
    runner.model = Compiled(4, 4)
    reason = worker.install(SimpleNamespace(model_runner=runner))
    assert reason is not None
    assert "Compiled bypasses forward hooks" in reason
