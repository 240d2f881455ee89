"""What the adapter expects of the installed vLLM. A failure says which expectation changed."""

import inspect
import multiprocessing
import pickle
import time
from multiprocessing.connection import Connection

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import Request
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as ModelRunnerV1

from isochunk.vllm import internals, scheduler, worker
from isochunk.vllm.batch_queue import SPIN_S


def source_without_comments(function: object) -> str:
    return "\n".join(
        line
        for line in inspect.getsource(function).splitlines()
        if not line.strip().startswith("#")
    )


def test_scheduler_calls_the_sizing_hook_for_running_and_waiting_requests() -> None:
    parameters = list(inspect.signature(Scheduler._reserve_prefill_lookahead).parameters)
    assert parameters == ["self", "request", "num_computed_tokens", "num_new_tokens"], (
        "the signature of Scheduler._reserve_prefill_lookahead changed"
    )
    source = source_without_comments(Scheduler.schedule)
    calls = source.split("self._reserve_prefill_lookahead(")[1:]
    assert len(calls) == 2, "Scheduler.schedule calls the sizing hook another number of times"
    for call in calls:
        assert "allocate_slots(" in call, "the sizing hook is called after KV blocks are allocated"
    assert "num_computed_tokens" in calls[1].split(")")[0]


def test_scheduler_has_the_state_the_adapter_reads() -> None:
    source = inspect.getsource(Scheduler.__init__)
    names = [*internals.SCHEDULER_NAMES[1:], "running", "waiting", "block_size"]
    for name in [*names, "max_num_scheduled_tokens", "max_model_len"]:
        assert f"self.{name}" in source, f"Scheduler no longer sets {name}"
    assert hasattr(Scheduler, internals.SCHEDULER_NAMES[0])
    source = inspect.getsource(Request)
    for name in ("request_id", "num_computed_tokens", "num_tokens", "has_encoder_inputs"):
        assert name in source, f"Request no longer has {name}"
    assert issubclass(AsyncScheduler, Scheduler)


def test_engine_core_sets_the_executor_before_it_builds_the_scheduler() -> None:
    source = source_without_comments(EngineCore.__init__)
    executor = source.index("self.model_executor = ")
    assert executor < source.index("self.scheduler: "), "EngineCore builds its scheduler first"


def test_every_batch_comes_back_through_update_from_output() -> None:
    source = source_without_comments(EngineCore.step_with_batch_queue)
    assert "self.scheduler.update_from_output(" in source


@pytest.mark.parametrize("executor", [Executor, MultiprocExecutor])
def test_executor_sends_functions_without_blocking(executor: type) -> None:
    parameters = inspect.signature(executor.collective_rpc).parameters
    assert {"method", "args", "non_block"} <= set(parameters), "collective_rpc changed"


@pytest.mark.parametrize("runner", [ModelRunnerV1, ModelRunnerV2])
def test_model_runners_have_what_the_worker_functions_use(runner: type) -> None:
    for name in ("execute_model", "get_model", "_dummy_run"):
        assert hasattr(runner, name), f"{runner.__module__} has no {name}"
    assert "is_profile" in inspect.signature(runner._dummy_run).parameters


def test_tag_travels_with_a_scheduler_output() -> None:
    output = SchedulerOutput.make_empty()
    setattr(output, worker.TAG, 7)
    assert getattr(pickle.loads(pickle.dumps(output)), worker.TAG) == 7


def test_schedulers_override_nothing_else() -> None:
    ours = {name for name in vars(scheduler.DynamicChunkingMixin) if not name.startswith("__")}
    assert ours - {"_adapter", "_tell"} == {
        "schedule",
        "update_from_output",
        "_reserve_prefill_lookahead",
        "add_request",
        "has_requests",
    }


def test_the_batch_queue_is_as_the_patch_expects() -> None:
    source = source_without_comments(EngineCore.__init__)
    assert "self.batch_queue_size = vllm_config.max_concurrent_batches" in source
    assert "self.batch_queue = deque(maxlen=self.batch_queue_size)" in source
    step = source_without_comments(EngineCore.step_with_batch_queue)
    # Without requests it schedules nothing and takes the oldest batch out.
    assert step.index("if self.scheduler.has_requests():") < step.index("self.scheduler.schedule(")
    assert step.index("self.scheduler.schedule(") < step.index("batch_queue.appendleft(")
    assert step.index("batch_queue.appendleft(") < step.index("elif not batch_queue:")
    assert step.index("elif not batch_queue:") < step.index("= batch_queue.pop()")
    # Between two steps, new requests come in.
    assert "self.scheduler.add_request(" in source_without_comments(EngineCore.add_request)
    assert "bool(self.batch_queue)" in source_without_comments(EngineCoreProc.has_work)


def test_results_are_awaited_as_the_patch_expects() -> None:
    assert "self.response_mqs" in source_without_comments(MultiprocExecutor)
    assert "self._spin_condition = SpinCondition(" in source_without_comments(MessageQueue)
    assert "self.last_read + self.busy_loop_s" in source_without_comments(SpinCondition.wait)
    # A notification with every message, so that whoever doesn't spin wakes up.
    assert "self._spin_condition.notify()" in source_without_comments(MessageQueue.enqueue)


def _write_pairs(connection: Connection, num_pairs: int) -> None:
    queue = MessageQueue(1, 1)
    connection.send(queue.export_handle())
    queue.wait_until_ready()
    connection.recv()
    for _ in range(num_pairs):
        time.sleep(0.05)
        queue.enqueue("first")
        end = time.monotonic() + 0.0009
        while time.monotonic() < end:
            pass
        queue.enqueue(time.monotonic())
    connection.recv()


def test_the_second_of_two_messages_is_noticed_at_once() -> None:
    """vLLM drops its notification: who doesn't spin would see it with the next pair only."""
    num_pairs = 40
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=_write_pairs, args=(theirs, num_pairs))
    writer.start()
    queue = MessageQueue.create_from_handle(ours.recv(), 0)
    queue.wait_until_ready()
    queue._spin_condition.busy_loop_s = SPIN_S
    ours.send("go")
    late = 0
    for _ in range(num_pairs):
        assert queue.dequeue(timeout=20) == "first"
        sent = queue.dequeue(timeout=20)
        late += time.monotonic() - sent > 0.04
    ours.send("end")
    writer.join()
    assert late <= num_pairs // 10  # the machine may be busy; without spinning it is most of them
