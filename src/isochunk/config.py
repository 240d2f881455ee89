"""All settings of dynamic chunking, in both spellings, with their ranges and messages.

Own spelling: ``additional_config={"isochunk": {...}}``, which is what the flags of
``isochunk serve`` become. vLLM-Ascend's: ``additional_config={"scheduler_config":
{"profiling_chunk_config": {...}}}`` or, as in its older releases, at the top level. Own
settings win over vLLM-Ascend's, those over the environment, that over the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

SMOOTH_FACTOR_ENV = "ISOCHUNK_DYNAMIC_CHUNKING_SMOOTH_FACTOR"
OWN_KEY = "isochunk"
OVERRIDE_ARG = "isochunk_fixed_chunk"
"""In a request's ``vllm_xargs``: fixed chunks of this many tokens, 0 = the whole budget."""
ASCEND_KEY = "profiling_chunk_config"

# vLLM-Ascend's name -> ours.
ASCEND_NAMES = {
    "enabled": "enabled",
    "smooth_factor": "smooth_factor",
    "min_chunk": "min_chunk_size",
    "need_timing": "runtime_calibration",
    "max_fit_chunk": "max_calibration_samples",
}
# A default that differs from ours: keeps the meaning of an existing command line.
ASCEND_DEFAULTS = {"smooth_factor": 1.0}
# Settings of the equal-latency rule: whoever gives one asks for that rule.
EQUAL_LATENCY_SETTINGS = ("smooth_factor", "min_chunk_size")


class ConfigError(ValueError):
    """A setting is wrong; the message names it, its value and what would be valid."""


class DynamicChunkingConfig(BaseModel):
    """Settings of dynamic chunking."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(False, description="true or false")
    policy: Literal["auto", "equal-latency", "fixed"] = Field(
        "auto", description="auto, equal-latency or fixed"
    )
    smooth_factor: float = Field(
        0.75,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="a number in [0, 1]: 0 = fixed chunks, 1 = fully fitted",
    )
    min_chunk_size: int = Field(
        4096,
        gt=0,
        description="a whole number of tokens > 0, below max_num_batched_tokens",
    )
    runtime_calibration: bool = Field(True, description="true or false")
    max_calibration_samples: int = Field(
        30, gt=5, description="a whole number > 5 of timed chunks per stage"
    )
    max_fit_error: float = Field(
        0.07,
        gt=0,
        le=0.5,
        allow_inf_nan=False,
        description="a number in (0, 0.5]: median relative error up to which a fit is used",
    )
    spare_batch: bool = Field(True, description="true or false")
    allow_request_override: bool = Field(False, description="true or false")
    trace_file: str | None = Field(None, description="a path, or nothing")

    @field_validator(
        "smooth_factor",
        "min_chunk_size",
        "max_calibration_samples",
        "max_fit_error",
        mode="before",
    )
    @classmethod
    def _is_number(cls, value: object) -> object:
        if isinstance(value, bool):  # Pydantic would take true for 1
            raise ValueError("a number is needed")
        return value

    def is_min_chunk_too_large(self, max_num_batched_tokens: int) -> bool:
        """Whether the equal-latency rule has no chunk between its minimum and the budget."""
        is_used = self.policy == "equal-latency"
        return is_used and self.min_chunk_size >= max_num_batched_tokens

    def explain_min_chunk(self, max_num_batched_tokens: int) -> str:
        """Why a minimum chunk that isn't below the budget [tokens] leaves nothing to size."""
        return (
            f"min_chunk_size={self.min_chunk_size} is not below max_num_batched_tokens="
            f"{max_num_batched_tokens}; it needs 1..{max_num_batched_tokens - 1}"
        )


def resolve_config(
    additional_config: Mapping[str, Any] | None,
    env: Mapping[str, str],
    own_names: Mapping[str, str] | None = None,
) -> DynamicChunkingConfig:
    """Settings from vLLM's ``additional_config`` and the environment.

    The policy is "auto" unless named, or unless a setting of the equal-latency rule is given.
    With the feature off nothing else is validated: a stale variable or key must not keep a
    server from starting.

    Args:
        additional_config: vLLM's setting of that name.
        env: environment variables.
        own_names: what to call own settings in messages, e.g. the flag that gave a value.

    Raises:
        ConfigError: the feature is on and a setting is unknown, of the wrong type or out of
            range.
    """
    source, values, names = _collect(additional_config or {})
    names |= own_names or {}
    if not _validate({"enabled": values.get("enabled", False)}, names).enabled:
        return DynamicChunkingConfig()
    if SMOOTH_FACTOR_ENV in env and "smooth_factor" not in values:
        values["smooth_factor"] = env[SMOOTH_FACTOR_ENV]
        names["smooth_factor"] = f"environment variable {SMOOTH_FACTOR_ENV}"
    if source == "ascend" or any(name in values for name in EQUAL_LATENCY_SETTINGS):
        values.setdefault("policy", "equal-latency")
    if source == "ascend":
        values = ASCEND_DEFAULTS | values
    settings = _validate(values, names)
    if settings.trace_file is not None and not Path(settings.trace_file).parent.is_dir():
        name = names["trace_file"]
        raise ConfigError(f"{name}={settings.trace_file!r} is not valid: no such directory")
    return settings


def _validate(values: dict[str, Any], names: Mapping[str, str]) -> DynamicChunkingConfig:
    try:
        return DynamicChunkingConfig(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error, names)) from None


def _collect(additional: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Which spelling, the values under our names, and what the user calls each of them."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    source = ""
    scheduler = additional.get("scheduler_config")
    nested = scheduler.get(ASCEND_KEY) if isinstance(scheduler, Mapping) else None
    for label, section in (
        (ASCEND_KEY, additional.get(ASCEND_KEY)),
        (f"scheduler_config.{ASCEND_KEY}", nested),
    ):
        if section is None or section is False:
            continue
        if _mapping(label, section).get("enabled", False) is not False:
            source = "ascend"
        for key, value in _mapping(label, section).items():
            name = ASCEND_NAMES.get(key, f"?{key}")
            values[name], names[name] = value, f"{label}.{key}"
    own = additional.get(OWN_KEY)
    if own is not None and own is not False:
        source = source or "own"
        for key, value in _mapping(OWN_KEY, own).items():
            values[key], names[key] = value, f"{OWN_KEY}.{key}"
    return source, values, names


def _mapping(label: str, section: object) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'{label}={section!r} is not valid: expected an object such as {{"enabled": true}}'
        )
    return section


def _explain(error: ValidationError, names: Mapping[str, str]) -> str:
    """One line per problem: what the user wrote, its value, and what would be valid."""
    lines = []
    fields = DynamicChunkingConfig.model_fields
    for problem in error.errors():
        key = str(problem["loc"][0])
        name = names.get(key, key.lstrip("?"))
        if problem["type"] == "extra_forbidden":
            known = ", ".join(ASCEND_NAMES if f"{ASCEND_KEY}." in name else fields)
            lines.append(f"{name}={problem['input']!r} is not a setting; known are: {known}")
        else:
            lines.append(
                f"{name}={problem['input']!r} is not valid: expected {fields[key].description}"
            )
    return "; ".join(lines)
