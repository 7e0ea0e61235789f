"""Prompts that mean nothing: token ids that every vocabulary has."""

import random

_IDS = range(100, 30_000)


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """The same ids every time, without repeats that a cache or a draft could use."""
    return random.Random(seed).sample(_IDS, num_tokens)
