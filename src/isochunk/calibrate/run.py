"""Sends single random prompts to a server until its calibration has ended."""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus

import httpx

from isochunk.calibrate.state import GIVEN_UP, INSTALLED, ServerState, StateError, read_state
from isochunk.client import Answer, ApiError, Client, ServedModel
from isochunk.metrics import OFF
from isochunk.probes import longest_too_short
from isochunk.profile import Profile, stages_of

DEFAULT_PROMPT_TOKENS = 131072
NUM_SAMPLE_CHARS = 8192
# The timings of a prompt's last chunks may reach the engine just after the answer.
SETTLE_S = 2.0


class CalibrateError(RuntimeError):
    """Nothing can be calibrated; the message names the option and what would be valid."""


class Outcome(StrEnum):
    """How it ended."""

    INSTALLED = "installed"
    ALREADY_INSTALLED = "already installed"
    GIVEN_UP = "given up"
    NOT_INSTALLED = "not installed"

    @property
    def is_installed(self) -> bool:
        """Whether the server has a model."""
        return self in (Outcome.INSTALLED, Outcome.ALREADY_INSTALLED)


@dataclass(frozen=True)
class Result:
    """What the server says in the end, and the answers to what was sent."""

    outcome: Outcome
    model: str
    state: ServerState
    answers: tuple[Answer, ...] = ()

    def to_profile(self, vllm_version: str) -> Profile:
        """The models as ``isochunk plan`` takes them; a step's overhead is included."""
        engine = self.state.engine
        return Profile(
            model_name=self.model,
            tensor_parallel_size=int(engine["tensor_parallel_size"]),
            device=engine["device"],
            max_num_batched_tokens=int(engine["max_num_batched_tokens"]),
            alignment=int(engine["alignment"]),
            versions={"vllm": vllm_version, "isochunk": engine["version"]},
            # An isochunk that doesn't say so kept what vLLM does.
            max_in_flight=int(engine.get("max_in_flight", 0)),
            spare_batch=engine.get("spare_batch") == "true",
            stages=stages_of([self.state.overhead.add_to(m) for m in self.state.models]),
        )


def calibrate_server(
    client: Client,
    prompt_tokens: int | None,
    num_requests: int,
    on_start: Callable[[int], None] = lambda num_tokens: None,
    on_answer: Callable[[Answer, ServerState], None] = lambda answer, state: None,
) -> Result:
    """Send prompts, one at a time, until the server has ended its calibration.

    Args:
        client: of the server; its ``model`` may be empty, then the first one served is asked.
        prompt_tokens: of each prompt; None: 131072, or what fits.
        num_requests: prompts at most.
        on_start: called with the prompts' length before the first is sent.
        on_answer: called after each.

    Raises:
        CalibrateError: the server can't be asked, or isn't one that calibrates.
    """
    try:
        served = _choose_model(client.models(), client.model)
        client.model = served.name
        state = read_state(client.metrics())
        if state.is_final:
            return _result(served, state, ())
        num_tokens = _choose_prompt_tokens(prompt_tokens, served, state)
        token_ids = _some_token_ids(client)
        on_start(num_tokens)
        answers: list[Answer] = []
        for prompt in random_prompts(token_ids, num_tokens, num_requests, random.Random()):
            answers.append(client.complete(prompt, max_tokens=1))
            is_last = len(answers) == num_requests
            state = _settled(client) if is_last else read_state(client.metrics())
            on_answer(answers[-1], state)
            if state.is_final:
                break
    except ApiError as error:
        raise CalibrateError(_explain(error)) from error
    except StateError as error:
        raise CalibrateError(f"--base-url: {error}") from error
    return _result(served, state, tuple(answers))


def random_prompts(
    token_ids: Sequence[int], num_tokens: int, count: int, rng: random.Random
) -> Iterator[list[int]]:
    """Prompts of uniformly drawn token ids; the first ids differ, so no KV block is shared."""
    firsts = rng.sample(token_ids, len(token_ids))
    for i in range(count):
        yield [firsts[i % len(firsts)], *rng.choices(token_ids, k=num_tokens - 1)]


def _some_token_ids(client: Client) -> list[int]:
    """Ids of ordinary tokens: the API doesn't tell the vocabulary, nor which ids are special."""
    letters = string.ascii_letters + string.digits + " "
    text = "".join(random.Random(0).choices(letters, k=NUM_SAMPLE_CHARS))
    return sorted(set(client.tokenize(text)))


def _choose_model(served: Sequence[ServedModel], name: str) -> ServedModel:
    names = [model.name for model in served]
    if name and name not in names:
        raise CalibrateError(f"--model={name!r} isn't served here; served are: {', '.join(names)}")
    return served[names.index(name)] if name else served[0]


def _choose_prompt_tokens(wanted: int | None, served: ServedModel, state: ServerState) -> int:
    longest = served.max_model_len and served.max_model_len - 1  # one token is generated
    budget = int(state.engine["max_num_batched_tokens"])
    is_auto = state.engine.get("policy") == "auto"
    chosen = wanted or min(DEFAULT_PROMPT_TOKENS, longest or DEFAULT_PROMPT_TOKENS)
    too_short = longest_too_short(budget, needs_shrink=not is_auto)
    if chosen <= too_short or (longest and chosen > longest):
        bounds = f"above {'half of ' if is_auto else ''}max_num_batched_tokens ({budget})"
        if longest:
            bounds += f" and at most max_model_len - 1 ({longest})"
        raise CalibrateError(
            f"--prompt-tokens={chosen} can't calibrate this server: it needs to be {bounds}"
        )
    return chosen


def _settled(client: Client) -> ServerState:
    """The state, once it is final or has had time to become so."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        state = read_state(client.metrics())
        if state.is_final or time.monotonic() > deadline:
            return state
        time.sleep(0.1)


def _result(served: ServedModel, state: ServerState, answers: tuple[Answer, ...]) -> Result:
    if state.phase == INSTALLED:
        outcome = Outcome.INSTALLED if answers else Outcome.ALREADY_INSTALLED
    elif state.phase == OFF and not answers:
        raise CalibrateError(f"--base-url: dynamic chunking is off on this server: {state.reason}")
    else:
        is_over = state.phase in (GIVEN_UP, OFF)
        outcome = Outcome.GIVEN_UP if is_over else Outcome.NOT_INSTALLED
    if outcome is Outcome.NOT_INSTALLED:
        state = replace(state, reason=_why_not_yet(state))
    return Result(outcome, served.name, state, answers)


def _why_not_yet(state: ServerState) -> str:
    if not state.fits:
        return (
            f"the server is still {state.phase} and has fitted nothing: other requests may have "
            "been running, or one prompt isn't enough; raise --requests on an idle server"
        )
    return f"the server is still {state.phase}; raise --requests"


def _explain(error: ApiError) -> str:
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"--api-key: the server wants another one: {error}"
    if error.status == HTTPStatus.BAD_REQUEST:
        return f"--prompt-tokens: the server refused the prompt: {error}"
    if isinstance(error.__cause__, httpx.TimeoutException):
        return f"--timeout: {error}"
    return f"--base-url: {error}"
