"""Proof that a claim comes from somebody who was given the blocks."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence


def new_secret() -> bytes:
    """A secret that a prefill rank shares with its own scheduler only."""
    return secrets.token_bytes(16)


def sign(secret: bytes, sequence: int, block_ids: Sequence[int]) -> str:
    """Key to a prompt's blocks on one rank: an HMAC-SHA256 over its number and block ids."""
    text = json.dumps([sequence, list(block_ids)]).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def is_signed(secret: bytes, sequence: int, block_ids: Sequence[int], key: str) -> bool:
    """Whether the key is that of these blocks."""
    return hmac.compare_digest(sign(secret, sequence, block_ids).encode(), key.encode())
