"""The token embedding, and the output head that may share its table."""

import torch

from eyas.layers.linear import Linear, load_linear
from eyas.layers.source import Source
from eyas.ops.base import Handle, Ops, Value

_COMPARED_ROWS = 4096


class Embedding:
    """Rows of a packed [V, H] table: ids [T] -> [T, H]."""

    def __init__(self, ops: Ops, handle: Handle, vocab_size: int) -> None:
        self._ops = ops
        self._handle = handle
        self._vocab_size = vocab_size

    def __call__(self, ids_T: Value) -> Value:
        return self._ops.embed(self._handle, ids_T)

    def as_head(self) -> Linear:
        """The head that shares this table: logits = hidden @ table.T."""
        return Linear(self._ops, self._handle, self._vocab_size)


def load_embedding_and_head(
    source: Source, vocab_size: int, hidden_size: int, tied: bool
) -> tuple[Embedding, Linear]:
    """``model.embed_tokens`` and ``lm_head``.

    A tied checkpoint may store the head as well; ValueError if it differs from the embedding.
    """
    shape = (vocab_size, hidden_size)
    table = source.weights.take("model.embed_tokens.weight", shape)
    embedding = Embedding(source.ops, source.ops.pack_embedding(table), vocab_size)
    if not tied:
        return embedding, load_linear(source, [("lm_head", vocab_size)], hidden_size, bias=False)
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
