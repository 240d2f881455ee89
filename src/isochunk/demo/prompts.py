"""Long prompts without a download: random tokens, and Python's own language reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pydoc_data.topics import topics

QUESTION = "Question: In Python, what does the `pass` statement do? Answer in one sentence."


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids of random printable ASCII characters of the toy model's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(94) for _ in range(num_tokens)]


def document_prompt(num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> str:
    """A question about ``num_tokens`` tokens of the Python language reference.

    The section that answers it stands last before the question; the ones before it change
    with ``seed``.
    """
    names = sorted(name for name in topics if name != "pass")
    random.Random(seed).shuffle(names)
    text = "\n\n".join(topics[name] for name in names)
    tail = f"\n\n{topics['pass']}\n\n{QUESTION}"
    num_chars = 3 * num_tokens  # a first guess, then corrected twice by what it really is
    for _ in range(2):
        count = count_tokens(text[:num_chars] + tail)
        num_chars = int(num_chars * num_tokens / count)
    return text[:num_chars] + tail
