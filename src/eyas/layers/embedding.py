"""The token embedding, and the output head that may share its table."""

from collections.abc import Sequence

import torch

from eyas.layers.linear import Linear
from eyas.layers.source import Source
from eyas.loading.shard import shard
from eyas.ops.base import Handle, Ops, Value
from eyas.parallel import Share, split_vocabulary

_COMPARED_ROWS = 4096


class Embedding:
    """Rows of a packed [V, H] table: ids [T] -> [T, H]."""

    def __init__(self, ops: Ops, handle: Handle, shares: Sequence[Share]) -> None:
        """``handle`` holds this rank's share of the vocabulary."""
        self._ops = ops
        self._handle = handle
        self._shares = shares

    def __call__(self, ids_T: Value) -> Value:
        own = self._shares[self._ops.parallel.rank]
        # One rank has the row, and the others add zeros.
        return self._ops.all_reduce(self._ops.embed(self._handle, ids_T, own.start))

    def as_head(self) -> "Head":
        """The head that shares this table: logits = hidden @ table.T."""
        return Head(self._ops, self._handle, self._shares)


class Head(Linear):
    """The output head over a packed [V, H] weight, of which ``handle`` holds this rank's share."""

    def __init__(self, ops: Ops, handle: Handle, shares: Sequence[Share]) -> None:
        super().__init__(ops, handle, shares[-1].stop)
        self._shares = shares

    def __call__(self, x_TK: Value) -> Value:
        return self._ops.all_gather(super().__call__(x_TK), self._shares)


def load_embedding_and_head(
    source: Source, vocab_size: int, hidden_size: int, tied: bool
) -> tuple[Embedding, Head]:
    """``model.embed_tokens`` and ``lm_head``.

    A tied checkpoint may store the head as well; ValueError if it differs from the embedding.
    """
    shape = (vocab_size, hidden_size)
    table = source.weights.take("model.embed_tokens.weight", shape)
    ops = source.ops
    shares = split_vocabulary(vocab_size, ops.parallel.size)
    own = shares[ops.parallel.rank]
    embedding = Embedding(ops, ops.pack_embedding(shard(table, rows=own)), shares)
    if not tied:
        head = source.weights.take("lm_head.weight", shape)
        return embedding, Head(ops, ops.pack_linear([shard(head, rows=own)], None), shares)
    if source.weights.has("lm_head.weight"):
        head = source.weights.take("lm_head.weight", shape)
        for start in range(0, vocab_size, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, vocab_size)
            if not torch.equal(head.read(start, stop), table.read(start, stop)):
                raise ValueError(
                    "tie_word_embeddings is true, but the checkpoint's lm_head.weight differs from "
                    "model.embed_tokens.weight: set tie_word_embeddings to false to use both"
                )
        head.release()
        table.release()
    return embedding, embedding.as_head()
