"""BlockPool: the KV blocks of one layer group, who holds them, and which can be found by content.

A block is in use (held by one or more tables) or free. A free block may still be published: its
content stays findable until the block is taken for something else. Free blocks are taken from the
front of the free list: first those without findable content, then the least recently freed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks, numbered from 0. Callers see to it that shared ones aren't written."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that are published."""
        return sum(self._num_holders[block] == 0 for block in self._published.values())

    def is_free(self, block: int) -> bool:
        return block in self._free

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which ``block`` is published, if it is."""
        return self._hashes[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block published under ``block_hash``, in use or free."""
        return self._published.get(block_hash)

    def take(self, count: int) -> list[int]:
        """Takes ``count`` free blocks for one holder each; their old content is forgotten."""
        assert count <= len(self._free), f"took {count} blocks of {len(self._free)} free ones"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._unpublish(block)
            self._num_holders[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Adds a holder to a published block."""
        assert self._hashes[block] is not None, f"block {block} is shared but not published"
        self._free.pop(block, None)
        self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each block, in order: of published ones, the first is the first to
        be taken again."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} was released twice"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes a block findable, unless another one with this content already is."""
        assert self._num_holders[block] > 0, f"block {block} is published but free"
        assert self._hashes[block] is None, f"block {block} was published twice"
        if self._published.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def unpublish_all(self) -> None:
        for block in list(self._published.values()):
            self._unpublish(block)

    def _unpublish(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless ``tables`` are exactly the holders of the blocks in use."""
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                holders[block] += 1
        for block, count in enumerate(holders):
            recorded = self._num_holders[block]
            assert recorded == count, f"block {block}: {recorded} holders recorded, {count} found"
            free = block in self._free
            assert free == (count == 0), f"block {block}: free is {free} with {count} holders"
            block_hash = self._hashes[block]
            assert block_hash is None or self._published.get(block_hash) == block, (
                f"block {block}: its hash finds block {self._published.get(block_hash)}"
            )
        num_published = sum(block_hash is not None for block_hash in self._hashes)
        assert num_published == len(self._published), (
            f"{len(self._published)} hashes find {num_published} published blocks"
        )
