"""Every tensor is accounted for exactly once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.loading.safetensors import read_directory
from eyas.loading.weights import CheckpointWeights

EMBEDDING = "model.embed_tokens.weight"


def weights(tmp_path: Path, tensors: dict[str, torch.Tensor], tied: bool = False):
    save_file(tensors, tmp_path / "model.safetensors")
    return CheckpointWeights(read_directory(tmp_path), "the file", tied)


def test_take_checks_name_and_shape(tmp_path: Path) -> None:
    stored = weights(tmp_path, {"a": torch.zeros(3, 2)})
    assert stored.has("a")
    assert not stored.has("b")
    with pytest.raises(ValueError, match="the file has no tensor b"):
        stored.take("b", (1,))
    with pytest.raises(ValueError, match=r"shape \[3, 2\], but its config calls for \[2, 3\]"):
        stored.take("a", (2, 3))
    assert torch.equal(stored.take("a", (3, 2)).read(), torch.zeros(3, 2))
    stored.finish()


def test_finish_names_what_nobody_took(tmp_path: Path) -> None:
    stored = weights(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    stored.take("a", (1,))
    with pytest.raises(ValueError, match=r"tensors that the model does not use: b$"):
        stored.finish()


def test_old_rotary_buffers_are_harmless(tmp_path: Path) -> None:
    weights(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}).finish()


def test_tied_head_may_repeat_the_embedding(tmp_path: Path) -> None:
    embedding = torch.arange(6.0).reshape(3, 2)
    copies = {EMBEDDING: embedding, "lm_head.weight": embedding.clone()}
    stored = weights(tmp_path, copies, tied=True)
    stored.take(EMBEDDING, (3, 2))
    stored.finish()

    untied = weights(tmp_path, copies)
    untied.take(EMBEDDING, (3, 2))
    with pytest.raises(ValueError, match=r"does not use: lm_head\.weight"):
        untied.finish()

    different = weights(tmp_path, {**copies, "lm_head.weight": embedding + 1}, tied=True)
    different.take(EMBEDDING, (3, 2))
    with pytest.raises(ValueError, match="they differ"):
        different.finish()
