"""Tensor parallelism: which rank holds which part of a model. Pure arithmetic.

Every rule gives contiguous shares in rank order that cover what is shared out, with none empty.
Shares may be uneven; the first ranks get more.
"""

from dataclasses import dataclass

_TILE = 16  # outputs that the kernels compute together


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the ``size`` that run one model together."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self


SINGLE = Parallel(0, 1)


@dataclass(frozen=True, slots=True)
class Share:
    """Items ``start .. stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> "Share":
        """The same share, counted in parts of which each item has ``factor``."""
        return Share(self.start * factor, self.stop * factor)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one rank, and the KV heads that they read."""

    query: Share
    kv: Share


def split_units(count: int, size: int, unit: int = 1) -> tuple[Share, ...] | None:
    """``count`` items over ``size`` ranks, cut at multiples of ``unit`` only; the end of the last
    share may be none. None if there are fewer units than ranks."""
    num_units = -(-count // unit)
    if num_units < size:
        return None
    ends = [min(count, end * unit) for end in _ends(num_units, size)]
    return tuple(Share(start, end) for start, end in zip([0, *ends], ends, strict=False))


def split_heads(num_query: int, num_kv: int, size: int) -> tuple[HeadShare, ...]:
    """Attention heads over ``size`` ranks: whole KV groups (a KV head and its query heads) as far
    as there are enough; with more ranks than KV heads each rank has a copy of one KV head, and the
    ranks that share it split its query heads.

    ValueError if there are more ranks than query heads.
    """
    if size > num_query:
        raise ValueError(
            f"tensor_parallel_size {size} is more than the model's {num_query} attention heads: "
            f"use at most {num_query}"
        )
    ratio = num_query // num_kv
    if size <= num_kv:
        groups = split_units(num_kv, size)
        assert groups is not None
        return tuple(HeadShare(group.scaled(ratio), group) for group in groups)
    shares: list[HeadShare] = []
    first_rank = 0
    for head, last_rank in enumerate(_ends(size, num_kv)):
        queries = split_units(ratio, last_rank - first_rank)
        assert queries is not None
        shares.extend(
            HeadShare(
                Share(head * ratio + query.start, head * ratio + query.stop),
                Share(head, head + 1),
            )
            for query in queries
        )
        first_rank = last_rank
    return tuple(shares)


def split_vocabulary(vocab_size: int, size: int) -> tuple[Share, ...]:
    """The ranks' rows of an embedding table or output head, cut at whole tiles where possible.

    ValueError if there are more ranks than tokens.
    """
    shares = split_units(vocab_size, size, _TILE) or split_units(vocab_size, size)
    if shares is None:
        raise ValueError(
            f"tensor_parallel_size {size} is more than the vocabulary's {vocab_size} tokens"
        )
    return shares


def split_threads(num_threads: int, size: int) -> tuple[int, ...]:
    """``num_threads`` over ``size`` ranks, at least one each."""
    ends = _ends(num_threads, size)
    return tuple(max(1, end - start) for start, end in zip([0, *ends], ends, strict=False))


def _ends(count: int, size: int) -> list[int]:
    """Where each of ``size`` nearly equal parts of ``count`` ends, the greater parts first."""
    small, more = divmod(count, size)
    return [small * (rank + 1) + min(rank + 1, more) for rank in range(size)]
