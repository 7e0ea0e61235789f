"""Hugging Face directories: right values, and one-line errors that name the fault."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.loading.safetensors import read_directory, read_file


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(4, 3, generator=generator).to(torch.bfloat16),
        "c": torch.randn(6, generator=generator).to(torch.float16),
    }


def save_shards(path: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    for name, content in shards.items():
        save_file(content, path / name)
    index = {tensor: name for name, content in shards.items() for tensor in content}
    write_index(path, index)
    return index


def write_index(path: Path, index: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_reads_rows_as_float32(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    read = {tensor.name: tensor for tensor in read_directory(tmp_path)}
    assert {name: tensor.format for name, tensor in read.items()} == {
        "a": "f32",
        "b": "bf16",
        "c": "f16",
    }
    for name, expected in tensors().items():
        assert read[name].shape == tuple(expected.shape)
        assert torch.equal(read[name].read(), expected.float())
        assert torch.equal(read[name].read(1, 3), expected[1:3].float())
        assert torch.equal(read[name].read(2), expected[2:].float())
        read[name].release()
        assert torch.equal(read[name].read(0, 1), expected[:1].float())


def test_reads_shards(tmp_path: Path) -> None:
    all_tensors = tensors()
    save_shards(
        tmp_path,
        {
            "x-1.safetensors": {"a": all_tensors["a"]},
            "x-2.safetensors": {k: all_tensors[k] for k in "bc"},
        },
    )
    read = {tensor.name: tensor.read() for tensor in read_directory(tmp_path)}
    assert read.keys() == all_tensors.keys()
    assert all(torch.equal(read[name], all_tensors[name].float()) for name in read)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    a, b = torch.zeros(2), torch.ones(2)
    index = save_shards(tmp_path, {"x-1.safetensors": {"a": a}, "x-2.safetensors": {"b": b}})

    write_index(tmp_path, {**index, "c": "x-2.safetensors"})
    with pytest.raises(ValueError, match=r"puts tensor c in x-2\.safetensors, which lacks it"):
        read_directory(tmp_path)
    write_index(tmp_path, {**index, "c": "x-3.safetensors"})
    with pytest.raises(ValueError, match=r"names the file x-3\.safetensors, which is not there"):
        read_directory(tmp_path)
    write_index(tmp_path, {**index, "c": "../x-3.safetensors"})
    with pytest.raises(ValueError, match="weight_map must map each tensor to a file name"):
        read_directory(tmp_path)
    write_index(tmp_path, {**index, "c": "x" * 5000})
    with pytest.raises(ValueError, match="weight_map must map each tensor to a file name"):
        read_directory(tmp_path)
    write_index(tmp_path, index)
    save_file({"b": b, "d": a}, tmp_path / "x-2.safetensors")
    with pytest.raises(ValueError, match=r"tensor d is in x-2\.safetensors, but .* no file"):
        read_directory(tmp_path)
    save_file({"a": a, "b": b}, tmp_path / "x-2.safetensors")
    with pytest.raises(ValueError, match=r"tensor a is in two files: x-1\.\w+ and x-2\.\w+"):
        read_directory(tmp_path)


def test_refuses_pickled_weights(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        read_directory(tmp_path)


def test_refuses_directories_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        read_directory(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "x-2.safetensors")
    with pytest.raises(ValueError, match=r"2 safetensors files but no .*index"):
        read_directory(tmp_path)


def test_refuses_other_types(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor a in .* has type I64"):
        read_directory(tmp_path)


def test_refuses_truncated_and_corrupt_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:4], whole[:-1], whole[:40], b"\xff" * 8 + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a readable safetensors file"):
            read_file(path)
    path.write_bytes(whole.replace(b'"data_offsets":[0,', b'"data_offsets":[4,'))
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        read_file(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_refuses_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    weight = torch.zeros(4, 2)
    weight[2, 1] = value
    save_file({"bad.weight": weight}, tmp_path / "model.safetensors")
    (tensor,) = read_directory(tmp_path)
    assert torch.equal(tensor.read(0, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"tensor bad\.weight .* not finite \(in rows 1 to 3\)"):
        tensor.read(1)


def test_large_finite_values_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.full((4,), 3e38)}, tmp_path / "model.safetensors")
    (tensor,) = read_directory(tmp_path)
    assert torch.equal(tensor.read(), torch.full((4,), 3e38))
