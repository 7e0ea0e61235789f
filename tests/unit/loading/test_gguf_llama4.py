"""Llama 4 GGUF files against the model that they were written from, and the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import save_tiny_gguf, tiny_model
from paged import PagedSequence

from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.name_map import hugging_face_name
from eyas.models.registry import load_model
from eyas.ops.native import NativeOps

LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
}
EPS = torch.finfo(torch.float32).eps


def test_names_of_llama4_match_the_gguf_package() -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA4, 3)
    for stored in (
        *(f"blk.2.attn_{x}" for x in ("norm", "q", "k", "v", "output")),
        *(f"blk.2.ffn_{x}" for x in ("norm", "gate", "up", "down", "gate_inp")),
        *(f"blk.2.ffn_{x}_{kind}" for x in ("gate", "up", "down") for kind in ("exps", "shexp")),
    ):
        name = hugging_face_name(f"{stored}.weight", "llama4")
        assert names.get_name(name.removesuffix(".weight")) == stored


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.25,
            "num_experts_per_tok": 2,
        },
        {
            "attention_chunk_size": None,
            "no_rope_layers": [1] * 4,
            "attn_temperature_tuning": False,
        },
        {"moe_layers": [], "tie_word_embeddings": True},
        {"num_local_experts": 128, "use_qk_norm": False},
    ],
)
def test_llama4_is_the_model_it_was_written_from(
    tmp_path: Path, quant: str, overrides: dict[str, Any]
) -> None:
    """The same hidden states as of its safetensors, in whose place quantised values stand."""
    settings = {**LLAMA4, **overrides}
    path = save_tiny_gguf(tmp_path, 3, quant, arch="llama4", **settings)
    model = tiny_model("llama4_text", 3, **settings)
    checkpoint = open_checkpoint(str(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "router" not in name and quant != "F32":
                kind = gguf.GGMLQuantizationType[quant]
                inputs_last = (
                    parameter.mT if "experts" in name and parameter.dim() == 3 else parameter
                )
                raw = gguf.quants.quantize(inputs_last.contiguous().numpy(), kind)
                values = torch.from_numpy(gguf.quants.dequantize(raw, kind))
                parameter.copy_(values.mT if inputs_last is not parameter else values)
    model.save_pretrained(tmp_path / "hf")
    ops = NativeOps(None, "float32")
    tokens = torch.randint(260, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    hidden, groups = [], []
    for opened in (checkpoint, open_checkpoint(str(tmp_path / "hf"))):
        loaded = load_model(opened.config, opened.weights, ops, "target")
        hidden.append(PagedSequence(loaded, ops, 40, block_size=8).forward(tokens))
        groups.append([(group.kv.num_layers, group.kv.chunk) for group in loaded.groups])
    assert groups[0] == groups[1]
    # Scale times integer, rounded once in the float file and not at all in the blocks.
    bound = 0 if quant == "F32" else 200 * EPS
    difference = (hidden[0] - hidden[1]).norm(dim=1)
    assert (difference <= bound * hidden[1].norm(dim=1)).all()


def test_llama4_files_that_say_nothing_mean_the_published_models(tmp_path: Path) -> None:
    settings = {**LLAMA4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    config = open_checkpoint(str(save_tiny_gguf(tmp_path, arch="llama4", **settings))).config
    assert config["attention_chunk_size"] == config["floor_scale"] == 8192
    assert (config["attn_scale"], config["use_qk_norm"]) == (0.1, True)
    assert config["moe_layers"] == [1, 3]
    with pytest.raises(ValueError, match="expert_gating_func = 1 is not supported"):
        open_checkpoint(str(save_tiny_gguf(tmp_path, arch="llama4", gating=1, **settings)))
