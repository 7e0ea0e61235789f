"""The ``Weights`` of a checkpoint: every tensor is taken by the model, or the load fails."""

import re
from collections.abc import Iterable

import numpy as np

from eyas.loading.mapped import MappedTensor

# Tensors that some checkpoints carry and no model needs. Rotary frequencies are computed from the
# config; transformers before 4.32 saved them as buffers all the same.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class CheckpointWeights:
    """Implements ``eyas.tensors.Weights`` over mapped tensors.

    ``tied`` says that the config ties the output head to the embedding: then an ``lm_head.weight``
    that repeats the embedding bit for bit may be left untaken.
    """

    def __init__(self, tensors: Iterable[MappedTensor], source: str, tied: bool) -> None:
        self._tensors: dict[str, MappedTensor] = {}
        for tensor in tensors:
            if tensor.name in self._tensors:
                raise ValueError(f"{source} holds the tensor {tensor.name} twice")
            self._tensors[tensor.name] = tensor
        self.source = source
        self._tied = tied
        self._taken: set[str] = set()

    def takeable(self) -> list[MappedTensor]:
        """The tensors that a model may take: all but the copy of the embedding that a tied head
        is."""
        copies = {HEAD} if self._tied and EMBEDDING in self._tensors else set()
        return [tensor for name, tensor in self._tensors.items() if name not in copies]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> MappedTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.source} has no tensor {name}, which its config calls for")
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name} in {self.source} has shape {list(tensor.shape)}, "
                f"but its config calls for {list(shape)}"
            )
        assert name not in self._taken, f"{name} taken twice"
        self._taken.add(name)
        return tensor

    def finish(self) -> None:
        left = sorted(
            name
            for name in self._tensors.keys() - self._taken
            if not _HARMLESS.search(name) and not self._is_tied_copy(name)
        )
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise ValueError(
                f"{self.source} holds tensors that the model does not use: "
                f"{', '.join(left[:8])}{more}"
            )

    def _is_tied_copy(self, name: str) -> bool:
        if name != HEAD or not self._tied or EMBEDDING not in self._tensors:
            return False
        head, embedding = self._tensors[HEAD], self._tensors[EMBEDDING]
        same = (head.shape, head.format) == (embedding.shape, embedding.format) and bool(
            np.array_equal(head.raw(), embedding.raw())
        )
        if not same:
            raise ValueError(
                f"{self.source}: the config ties {HEAD} to {EMBEDDING}, but the file holds "
                f"both and they differ; set tie_word_embeddings to false to use {HEAD}"
            )
        return True
