"""KVManager: which KV blocks each request holds in each layer group, and prefix reuse.

Three rules keep the cache true. A block is published only when all its tokens are accepted and its
group's KV is written. Blocks are freed by committed length, never by scheduled length, and after
the step. Shared blocks are never written: a hit ends at a block edge, and what follows is private.
"""

import hashlib
from array import array
from collections.abc import Collection
from dataclasses import dataclass

from eyas.engine.block_pool import BlockPool
from eyas.engine.request import Request
from eyas.kv_spec import KVGroupSpec
from eyas.types import BlockTable


def hash_block(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """The hash of a full block: of its tokens and, through ``parent``, of all before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


@dataclass(slots=True)
class _Table:
    """``blocks[i]`` is block ``first + i`` of the sequence. The first ``num_sealed`` blocks of the
    sequence are full and were offered for publication. ``view`` is the table as sent, or None if
    it has changed since."""

    first: int
    blocks: list[int]
    num_sealed: int
    view: BlockTable | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(slots=True)
class _Holding:
    """One running request's tables, one per group (empty where it doesn't use the group), and how
    many leading positions its draft groups' KV holds."""

    tables: tuple[_Table, ...]
    draft_length: int


class KVManager:
    """``num_blocks`` has one entry per group, in the executor's group order. Lengths are numbers of
    leading positions; a target length concerns the target's groups, a draft length the draft's."""

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        enable_prefix_caching: bool,
    ) -> None:
        assert len(groups) == len(num_blocks), f"{len(groups)} groups, {len(num_blocks)} pools"
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: it must be at least 1")
        for group in groups:
            if group.chunk is not None and group.chunk % block_size:
                raise ValueError(
                    f"block_size is {block_size}, but the {group.owner} model's layers attend in "
                    f"chunks of {group.chunk} positions: block_size must divide that"
                )
        self.groups = groups
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._holdings: dict[str, _Holding] = {}

    def uses(self, request: Request, group: KVGroupSpec) -> bool:
        return group.owner == "target" or request.speculate

    def max_blocks(self, group: KVGroupSpec, length: int, step: int) -> int:
        """The most blocks of ``group`` that a request holds while it grows to ``length`` positions,
        at most ``step`` of them beyond the committed ones at any time."""
        blocks = self._blocks_for(length)
        most = group.max_blocks(step, self.block_size)
        return blocks if most is None else min(blocks, most)

    def find_hit(self, request: Request) -> int:
        """How many leading tokens the cache can serve in every group that ``request`` uses.

        A multiple of the block size that leaves at least one token to compute. A group with full
        attention must have all blocks of the prefix, one with a window or chunk those that the
        next token sees. A request with ``prompt_logprobs`` doesn't read the cache: it needs every
        row.
        """
        if not self._reads_cache(request):
            return 0
        length = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, length)
        used = [
            (group, pool)
            for group, pool in zip(self.groups, self.pools, strict=True)
            if self.uses(request, group)
        ]
        for group, pool in used:
            if group.reach is None:
                for index in range(length):
                    if pool.find(self._key(request, group, index)) is None:
                        length = index
                        break
        # Shortening for one group moves what the others need: repeat until all agree.
        before = -1
        while before != length:
            before = length
            for group, pool in used:
                if group.reach is not None:
                    length = self._longest_bounded(request, group, pool, length)
        return length * self.block_size

    def _longest_bounded(
        self, request: Request, group: KVGroupSpec, pool: BlockPool, length: int
    ) -> int:
        """The greatest number of blocks, at most ``length``, of which all that the next token
        sees are published."""
        index = length
        while index > group.first_needed(length * self.block_size) // self.block_size:
            index -= 1
            if pool.find(self._key(request, group, index)) is None:
                length = index  # every longer prefix down from here needs this block
        return length

    def admit(self, request: Request, hit: int, target_length: int, draft_length: int) -> bool:
        """Gives a request its first tables: the ``hit`` leading positions (from ``find_hit``)
        shared, the rest up to the lengths private. Returns False, and changes nothing, if some
        group lacks the blocks, or lacks them for all known tokens: a prompt whose first chunk
        fits but not its last would only be preempted."""
        assert request.request_id not in self._holdings, f"{request.request_id} is running"
        shared: list[tuple[int, list[int]]] = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            if not self.uses(request, group):
                shared.append((0, []))
                continue
            first, blocks = self._find_shared(request, group, pool, hit)
            length = target_length if group.owner == "target" else draft_length
            if group.reach is None:
                length = max(length, request.num_tokens)
            needed = self._blocks_for(length) - first - len(blocks)
            if needed + sum(map(pool.is_free, blocks)) > pool.num_free:
                return False
            shared.append((first, blocks))
        for pool, (_, blocks) in zip(self.pools, shared, strict=True):
            for block in blocks:
                pool.share(block)
        tables = tuple(_Table(first, blocks, hit // self.block_size) for first, blocks in shared)
        self._holdings[request.request_id] = _Holding(tables, draft_length=hit)
        extended = self.extend(request, target_length, draft_length)
        assert extended, f"{request.request_id}: blocks were counted but are not there"
        if self._reads_cache(request) and request.num_preemptions == 0:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += hit
        return True

    def _find_shared(
        self, request: Request, group: KVGroupSpec, pool: BlockPool, hit: int
    ) -> tuple[int, list[int]]:
        first = group.first_needed(hit) // self.block_size
        blocks: list[int] = []
        for index in range(first, hit // self.block_size):
            block = pool.find(self._key(request, group, index))
            assert block is not None, f"{request.request_id}: block {index} of the hit is gone"
            blocks.append(block)
        return first, blocks

    def extend(self, request: Request, target_length: int, draft_length: int) -> bool:
        """Makes room up to the lengths in every group, or returns False and changes nothing."""
        holding = self._holdings[request.request_id]
        needed: list[int] = []
        for group, pool, table in zip(self.groups, self.pools, holding.tables, strict=True):
            length = target_length if group.owner == "target" else draft_length
            used = self.uses(request, group)
            needed.append(max(self._blocks_for(length) - table.end, 0) if used else 0)
            if needed[-1] > pool.num_free:
                return False
        for pool, table, count in zip(self.pools, holding.tables, needed, strict=True):
            if count:
                table.blocks += pool.take(count)
                table.view = None
        return True

    def tables(self, request: Request) -> tuple[BlockTable, ...]:
        """The block tables of a running request, one per group."""
        views: list[BlockTable] = []
        for table in self._holdings[request.request_id].tables:
            if table.view is None:
                table.view = BlockTable(table.first, tuple(table.blocks))
            views.append(table.view)
        return tuple(views)

    def commit(self, request: Request, draft_length: int) -> None:
        """Takes note, after a step, that the target's KV holds ``request.num_computed`` accepted
        positions and the draft's ``draft_length``: publishes the blocks that are now full, and
        frees those that no later token sees. Rejected tokens' blocks stay with the request,
        which writes its next tokens there."""
        holding = self._holdings[request.request_id]
        assert request.num_computed <= request.num_tokens, (
            f"{request.request_id}: KV of {request.num_computed} of {request.num_tokens} tokens"
        )
        if request.speculate and any(group.owner == "draft" for group in self.groups):
            assert holding.draft_length <= draft_length <= request.num_tokens, (
                f"{request.request_id}: draft KV went from {holding.draft_length} positions to "
                f"{draft_length} of {request.num_tokens} known tokens"
            )
            holding.draft_length = draft_length
        for group, pool, table in zip(self.groups, self.pools, holding.tables, strict=True):
            if not self.uses(request, group):
                continue
            length = self._true_length(request, group, draft_length)
            assert length <= table.end * self.block_size, (
                f"{request.request_id}: {length} positions written, {table.end} blocks held"
            )
            self._seal(request, group, pool, table, length // self.block_size)
            num_passed = group.first_needed(length) // self.block_size - table.first
            if num_passed > 0:
                pool.release(table.blocks[:num_passed])
                del table.blocks[:num_passed]
                table.first += num_passed
                table.view = None

    def _true_length(self, request: Request, group: KVGroupSpec, draft_length: int) -> int:
        """How many leading positions of the group's KV follow from known tokens alone."""
        if group.owner == "target":
            return request.num_computed
        # A stop rule may have cut the token after the last.
        return min(draft_length, request.num_tokens - group.needs_next_token)

    def _seal(
        self,
        request: Request,
        group: KVGroupSpec,
        pool: BlockPool,
        table: _Table,
        num_full: int,
    ) -> None:
        if self.enable_prefix_caching:
            self._extend_hashes(request, num_full)
            for index in range(table.num_sealed, num_full):
                key = self._key(request, group, index)
                pool.publish(table.blocks[index - table.first], key)
        table.num_sealed = max(table.num_sealed, num_full)

    def free(self, request: Request) -> None:
        """Takes all blocks from a running request. Published ones stay findable; tails are taken
        for new content before the heads that they depend on."""
        holding = self._holdings.pop(request.request_id)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            pool.release(reversed(table.blocks))

    def reset_prefix_cache(self) -> None:
        """Makes every published block unfindable; running requests keep theirs."""
        for pool in self.pools:
            pool.unpublish_all()

    def num_used_blocks(self) -> tuple[int, ...]:
        """Per group, the blocks that running requests hold."""
        return tuple(pool.num_blocks - pool.num_free for pool in self.pools)

    def num_cached_blocks(self) -> tuple[int, ...]:
        """Per group, the free blocks whose content can still be found."""
        return tuple(pool.num_cached for pool in self.pools)

    def check_integrity(self, live_requests: Collection[Request]) -> None:
        """Raises AssertionError if a block is lost, held by nobody known, or wrongly published.

        ``live_requests`` are all requests that haven't finished. With none, every block is free.
        """
        by_id = {request.request_id: request for request in live_requests}
        strangers = self._holdings.keys() - by_id.keys()
        assert not strangers, f"finished requests hold blocks: {sorted(strangers)}"
        for group_index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            tables = [holding.tables[group_index] for holding in self._holdings.values()]
            pool.check_integrity([table.blocks for table in tables])
            for request_id, holding in self._holdings.items():
                request, table = by_id[request_id], holding.tables[group_index]
                if not self.uses(request, group):
                    assert not table.blocks, f"{request_id} holds blocks of an unused group"
                    continue
                length = self._true_length(request, group, holding.draft_length)
                assert table.first <= group.first_needed(length) // self.block_size, (
                    f"{request_id}: blocks before {table.first} freed at length {length}"
                )
                for index, block in enumerate(table.blocks, start=table.first):
                    block_hash = pool.hash_of(block)
                    assert block_hash is None or (
                        index < length // self.block_size
                        and block_hash == self._key(request, group, index)
                    ), f"{request_id}: block {index} ({block}) is published wrongly"

    def _reads_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.rules.prompt_logprobs is None

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _key(self, request: Request, group: KVGroupSpec, index: int) -> bytes:
        """What full block ``index`` is published under: a hash of all that its KV follows from."""
        block_hash = request.block_hashes[index]
        if not group.needs_next_token:
            return block_hash
        end = (index + 1) * self.block_size
        assert end < request.num_tokens, f"{request.request_id}: no token follows block {index}"
        return hash_block(block_hash, request.tokens(end, end + 1))

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Makes sure that the hashes of the first ``count`` blocks are known."""
        hashes = request.block_hashes
        for index in range(len(hashes), count):
            start = index * self.block_size
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, request.tokens(start, start + self.block_size)))
