"""Fitted stage models on disk, with what they were measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile can't be read or written; the message names the file and the field."""


class StageCoefficients(BaseModel):
    """Coefficients of one stage's latency model, in ms and tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fixed_ms: Coefficient
    prefix_ms: Coefficient
    token_ms: Coefficient
    attention_ms: Coefficient

    @model_validator(mode="after")
    def _not_all_zero(self) -> Self:
        self.to_model()
        return self

    def to_model(self) -> LatencyModel:
        """The latency model with these coefficients."""
        return LatencyModel(self.fixed_ms, self.prefix_ms, self.token_ms, self.attention_ms)

    @classmethod
    def from_model(cls, model: LatencyModel) -> StageCoefficients:
        """The coefficients of a model."""
        return cls(
            fixed_ms=model.fixed_ms,
            prefix_ms=model.prefix_ms,
            token_ms=model.token_ms,
            attention_ms=model.attention_ms,
        )


class Profile(BaseModel):
    """Per-stage models and the deployment that they hold for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    model_name: str
    tensor_parallel_size: int = Field(1, ge=1)
    device: str
    max_num_batched_tokens: int = Field(ge=1)
    alignment: int = Field(ge=1)
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version, e.g. of vLLM and isochunk."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage, if known."""
    max_in_flight: int = Field(0, ge=0)
    """Batches that the engine keeps in flight; 0: one per stage."""
    spare_batch: bool = False
    """Whether it keeps one more for a prefill that is alone, under the policy auto."""
    transfer_fixed_ms: Coefficient = 0.0
    transfer_token_ms: Coefficient = 0.0
    stages: tuple[StageCoefficients, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _layers_match(self) -> Self:
        if self.layers is not None and len(self.layers) != len(self.stages):
            raise ValueError(f"layers has {len(self.layers)} entries for {len(self.stages)} stages")
        if self.layers is not None and min(self.layers) < 1:
            raise ValueError(f"layers={self.layers} must be >= 1 each")
        return self

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def models(self) -> tuple[LatencyModel, ...]:
        """Latency models by stage."""
        return tuple(stage.to_model() for stage in self.stages)

    def to_pipeline(self) -> Pipeline:
        """What the planner and the simulator take."""
        return Pipeline(
            self.models,
            self.transfer_fixed_ms,
            self.transfer_token_ms,
            self.max_in_flight,
            self.spare_batch,
        )


def stages_of(models: Sequence[LatencyModel]) -> tuple[StageCoefficients, ...]:
    """``Profile.stages`` for some models."""
    return tuple(StageCoefficients.from_model(model) for model in models)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON.

    Raises:
        ProfileError: the file can't be written.
    """
    try:
        path.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{path}: can't be written: {error.strerror}") from error


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: the file can't be read, isn't JSON, or a field is missing or wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(f"{path}: can't be read: {reason}") from error
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'profile'}: {item['msg']}"
            for item in error.errors()
        )
        raise ProfileError(f"{path}: {problems}") from None
