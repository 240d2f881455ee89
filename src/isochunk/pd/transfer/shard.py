"""What one rank of an instance holds of the KV cache, and who has what another rank needs."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field


class LayoutError(ValueError):
    """Two instances' caches don't fit together; the message names what differs."""


class Rank(BaseModel):
    """A rank's place in its instance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pp: int = Field(ge=0)
    tp: int = Field(ge=0)


class Shard(BaseModel):
    """The part of the KV cache that one rank holds.

    A block of a layer is ``num_heads`` pieces of ``head_bytes`` bytes (keys and values of
    ``block_size`` tokens of one KV head). Heads are numbered over the whole model; a model
    with a latent (MLA) cache has one, which every TP rank holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Rank
    layers: tuple[str, ...]
    first_head: int = Field(ge=0)
    num_heads: int = Field(gt=0)
    total_heads: int = Field(gt=0)
    block_size: int = Field(gt=0)
    head_bytes: int = Field(gt=0)
    storage: str

    @property
    def heads(self) -> range:
        """The model's KV heads on this rank."""
        return range(self.first_head, self.first_head + self.num_heads)


def heads_of_rank(total_heads: int, tp_rank: int, tp_size: int) -> range:
    """KV heads of a TP rank: a share of them, or one that several ranks hold.

    Args:
        total_heads: KV heads of the model.
        tp_rank: in ``0..tp_size - 1``.
        tp_size: tensor-parallel size.
    """
    if total_heads >= tp_size:
        share = total_heads // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    head = tp_rank * total_heads // tp_size
    return range(head, head + 1)


def check_compatible(local: Shard, remote: Shard) -> None:
    """That blocks of two shards have the same meaning, heads and layers aside.

    Raises:
        LayoutError: block size, storage or head size differ.
    """
    for field, unit in (
        ("block_size", " tokens"),
        ("storage", ""),
        ("total_heads", " KV heads"),
        ("head_bytes", " bytes"),
    ):
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise LayoutError(
                f"{field}={theirs!r} of the prefill instance is not this instance's "
                f"{ours!r}{unit}: both need the same model, KV cache type and block size"
            )


class Piece(BaseModel):
    """What to ask one rank for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[str, ...]
    first_head: int = Field(ge=0)
    num_heads: int = Field(ge=0)


def plan_pieces(local: Shard, remotes: Iterable[Shard]) -> dict[Rank, Piece]:
    """Which layers and heads to fetch from which rank, so that each comes exactly once.

    Where several TP ranks hold the same heads (MLA, or fewer KV heads than ranks), local TP
    ranks spread over them.

    Raises:
        LayoutError: the caches differ, or some layer or head is on no rank.
    """
    remotes = list(remotes)
    for remote in remotes:
        check_compatible(local, remote)
    pieces: dict[Rank, Piece] = {}
    missing = set(local.layers)
    for stage in sorted({remote.rank.pp for remote in remotes}):
        ranks = sorted((r for r in remotes if r.rank.pp == stage), key=lambda r: r.rank.tp)
        layers = tuple(layer for layer in local.layers if layer in set(ranks[0].layers))
        if not layers:
            continue
        missing -= set(layers)
        for first, holders in _runs(local.heads, ranks):
            chosen = holders[local.rank.tp % len(holders)]
            count = min(local.heads.stop, chosen.heads.stop) - first
            pieces[chosen.rank] = Piece(layers=layers, first_head=first, num_heads=count)
    if missing:
        raise LayoutError(f"no prefill stage has layer {min(missing)!r} ({len(missing)} missing)")
    return pieces


def _runs(heads: range, ranks: list[Shard]) -> Iterable[tuple[int, list[Shard]]]:
    """Successive heads, each with the ranks that hold all from there to the run's end."""
    head = heads.start
    while head < heads.stop:
        holders = [rank for rank in ranks if head in rank.heads]
        if not holders:
            raise LayoutError(f"KV head {head} is on no rank of prefill stage {ranks[0].rank.pp}")
        yield head, holders
        head = holders[0].heads.stop
