"""Run on workers by tests: module-level, so that they can be sent there."""

from typing import Any


def leftovers(worker: Any) -> list[str]:
    """What of the timing is still on this worker."""
    runner = worker.model_runner
    model = runner.get_model()
    found = [name for name in vars(runner) if "isochunk" in name or name == "execute_model"]
    found += [str(hook) for hook in model._forward_hooks.values()]
    found += [str(hook) for hook in model._forward_pre_hooks.values()]
    return found


def num_layers(worker: Any) -> int:
    """Decoder layers that this stage really holds."""
    layers = worker.model_runner.get_model().model.layers
    return sum(type(layer).__name__ != "PPMissingLayer" for layer in layers)
