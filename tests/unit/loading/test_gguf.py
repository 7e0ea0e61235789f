"""GGUF files against the model that they were written from, and against the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import interleave_rope, save_tiny_gguf, tiny_model

from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.gguf import GGUFFile
from eyas.loading.gguf_config import read_config
from eyas.loading.mapped import MappedTensor
from eyas.loading.name_map import hugging_face_name

WHOLE_BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMALLEST = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None):
    """A GGUF file with exactly this metadata (its architecture is written as any other key)."""
    writer = gguf.GGUFWriter(path, "unused")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in (tensors or {"token_embd.weight": np.zeros((3, 8), np.float32)}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(tmp_path: Path, tensors: Any = None, **changes: Any) -> dict[str, Any]:
    metadata = {**SMALLEST, **{k.replace("__", "."): v for k, v in changes.items()}}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return read_config(GGUFFile(write(tmp_path / "m.gguf", metadata, tensors)))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gives_back_the_model_it_was_written_from(tmp_path: Path, arch: str) -> None:
    overrides = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    checkpoint = open_checkpoint(str(save_tiny_gguf(tmp_path, 3, arch=arch, **overrides)))
    model = tiny_model(arch, 3, **overrides)
    for name, expected in model.state_dict().items():
        stored = checkpoint.weights.take(name, tuple(expected.shape))
        assert stored.name == name
        assert torch.equal(stored.read(), expected)
        assert torch.equal(stored.read(3, 8), expected[3:8])
        stored.release()
    checkpoint.weights.finish()

    config, expected_config = checkpoint.config, model.config.to_dict()
    assert config["model_type"] == arch
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "vocab_size",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        if key in expected_config:
            assert config[key] == expected_config[key], key
    assert config["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps)
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_rows_are_those_of_the_gguf_package(tmp_path: Path, quant: str) -> None:
    path = save_tiny_gguf(tmp_path, 4, quant, tie_word_embeddings=True, **WHOLE_BLOCKS)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["tie_word_embeddings"]
    heads = {"attn_q": 8, "attn_k": 4}
    for tensor in gguf.GGUFReader(path).tensors:
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        stored = checkpoint.weights.take(
            hugging_face_name(tensor.name, "llama"), tuple(expected.shape)
        )
        stem = tensor.name.split(".")[-2]
        actual = stored.read().numpy()
        if stem in heads:
            actual = interleave_rope(actual, heads[stem])
        assert np.array_equal(actual, expected.numpy()), tensor.name
        assert torch.equal(stored.read(5, 9), stored.read()[5:9])
    checkpoint.weights.finish()


def test_names_match_the_gguf_package() -> None:
    for arch in ("LLAMA", "QWEN2", "QWEN3"):
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 3)
        for kind in ("weight", "bias"):
            for stored in (
                *("token_embd", "output_norm", "output"),
                *(f"blk.2.attn_{x}" for x in ("norm", "q", "k", "v", "output")),
                *(f"blk.2.ffn_{x}" for x in ("norm", "gate", "up", "down")),
                *((f"blk.2.attn_{x}_norm" for x in "qk") if arch == "QWEN3" else ()),
            ):
                name = hugging_face_name(f"{stored}.{kind}", arch.lower())
                assert names.get_name(name.removesuffix(f".{kind}")) == stored
    experts = "blk.0.ffn_gate_exps.weight"
    assert hugging_face_name(experts, "llama") == experts


def test_config_defaults_and_extras(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 4
    assert config["rope_theta"] == 10000.0
    assert config["vocab_size"] == 3
    assert config["rope_scaling"] is None
    assert "rope_freq_factors" not in config

    linear = config_of(
        tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0
    )
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    window = config_of(tmp_path, llama__attention__sliding_window=32)
    assert (window["model_type"], window["sliding_window"]) == ("mistral", 32)

    factors = {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)}
    assert config_of(tmp_path, factors)["rope_freq_factors"] == [1.0, 8.0]
    open_checkpoint(str(tmp_path / "m.gguf")).weights.finish()  # the factors are accounted for


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'; supported: llama"),
        ({"general__architecture": None}, "lacks the metadata general.architecture"),
        ({"llama__block_count": None}, "lacks the metadata llama.block_count"),
        ({"llama__block_count": "two"}, "llama.block_count should be an integer"),
        ({"llama__embedding_length": 0}, "llama.embedding_length is 0, but must be positive"),
        ({"llama__expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama__attention__head_count": [2, 2]}, "head_count should be an integer"),
        ({"llama__attention__value_length": 6}, "differs from the head size 4"),
        ({"llama__rope__dimension_count": 2}, "differs from the head size 4"),
        ({"llama__rope__scaling__type": "yarn"}, "scaling.type = 'yarn' is not supported"),
        ({"llama__rope__freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"tokenizer__ggml__tokens": None}, "lacks the metadata llama.vocab_size"),
        ({"split__count": 3}, "one piece of a split model"),
    ],
)
def test_refuses_what_it_cannot_honour(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **changes)


def test_refuses_wrong_rope_factors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \[3\], but a head size of 4 calls for \[2\]"):
        config_of(tmp_path, {"rope_freqs.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="not positive"):
        config_of(tmp_path, {"rope_freqs.weight": np.zeros(2, np.float32)})


def test_refuses_projections_that_are_not_whole_heads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SMALLEST, {"blk.0.attn_q.weight": np.zeros((6, 8), "f4")})
    with pytest.raises(ValueError, match=r"attn_q\.weight .* has 6 rows, .* 2 heads of 4"):
        open_checkpoint(str(path))


def test_unknown_tensors_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SMALLEST, {"blk.0.strange.weight": np.zeros((6, 8), "f4")})
    with pytest.raises(ValueError, match=r"does not use: blk\.0\.strange\.weight"):
        open_checkpoint(str(path)).weights.finish()


def test_refuses_types_without_a_decoder(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("token_embd.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"token_embd\.weight has the type IQ4_NL"):
        GGUFFile(tmp_path / "m.gguf")


def test_refuses_damaged_files(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SMALLEST)
    whole = path.read_bytes()

    def error(damaged: bytes) -> str:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"m\.gguf") as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    many = (1 << 62).to_bytes(8, "little")
    assert "is empty" in error(b"")
    assert "is not a GGUF file" in error(b"GGML" + whole[4:])
    assert "has GGUF version 1" in error(whole[:4] + b"\x01\0\0\0" + whole[8:])
    assert "is big-endian" in error(whole[:4] + b"\0\0\0\x03" + whole[8:])
    assert "tensor count claims" in error(whole[:8] + many + whole[16:])
    assert "metadata count claims" in error(whole[:16] + many + whole[24:])
    assert "a metadata key claims" in error(whole[:24] + many + whole[32:])
    assert "is cut short" in error(whole[:-8])
    name = whole.index(b"token_embd.weight") + len(b"token_embd.weight")
    dims, offset = name + 4, name + 4 + 16 + 4
    assert "is cut short" in error(whole[:dims] + many + whole[dims + 8 :])
    assert "dimension of 0" in error(whole[:dims] + bytes(8) + whole[dims + 8 :])
    assert "is cut short" in error(whole[:offset] + many + whole[offset + 8 :])
    assert "not aligned" in error(whole[:offset] + b"\x01" + whole[offset + 1 :])


def test_refuses_overlapping_tensors(tmp_path: Path) -> None:
    zeros = np.zeros((4, 8), np.float32)
    path = write(tmp_path / "m.gguf", SMALLEST, {"one": zeros, "two": zeros})
    whole = path.read_bytes()
    offset = whole.rindex(b"two") + 3 + 4 + 16 + 4
    assert int.from_bytes(whole[offset : offset + 8], "little") == zeros.nbytes
    path.write_bytes(whole[:offset] + bytes(8) + whole[offset + 8 :])
    with pytest.raises(ValueError, match="overlaps one"):
        GGUFFile(path)


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read_by_rows(tmp_path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    raw = np.full((6, 2 * gguf.GGML_QUANT_SIZES[kind][1]), 0x2B, np.uint8)
    raw[:, ::5] += np.arange(6, dtype=np.uint8)[:, None]  # small scales, rows that differ
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    entry = file.tensors["token_embd.weight"]
    assert (entry.shape, entry.format) == ((6, 512), quant.lower())
    tensor = MappedTensor(entry.name, entry.shape, entry.format, file.file, entry.offset)
    expected = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(tensor.read().numpy(), expected)
    assert np.array_equal(tensor.read(2, 5).numpy(), expected[2:5])
