"""Quantising as a checkpoint loads, and the cache file."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from checkpoints import interleave_rope, save_tiny_gguf
from safetensors import safe_open
from safetensors.torch import save_file

from eyas import _core
from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.mapped import MappedTensor
from eyas.loading.quantised_cache import CacheWriter
from eyas.loading.requantise import QuantisedTensor, QuantisedWeights
from eyas.loading.safetensors import read_directory
from eyas.loading.weights import CheckpointWeights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
KINDS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, in this test's own directory."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "eyas" / "quantised"


def context(num_threads: int = 2) -> _core.Context:
    return _core.Context(_core.instruction_sets()[0], num_threads)


def reference(rows: np.ndarray, format: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), KINDS[format])


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EMBEDDING: torch.randn(50, 64, generator=generator),
        PROJECTION: torch.randn(64, 64, generator=generator),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(64, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 96, generator=generator),
        "model.layers.0.mlp.odd.weight": torch.randn(32, 48, generator=generator),
        "model.norm.weight": torch.randn(64, generator=generator),
        HEAD: torch.randn(50, 64, generator=generator),
    }


def save(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: v.to(dtype) for k, v in tensors(seed).items()}, folder / "model.safetensors")
    return folder


def load(folder: Path, scheme: str = "q4", tied: bool = False) -> QuantisedWeights:
    weights = CheckpointWeights(read_directory(folder), str(folder), tied)
    return QuantisedWeights(weights, scheme, context())


def take_all(weights: QuantisedWeights, seed: int = 0) -> dict[str, np.ndarray]:
    """What a model does: every tensor once, then finish. Bytes by name; vectors' values."""
    content = {}
    for name, values in tensors(seed).items():
        tensor = weights.take(name, tuple(values.shape))
        assert (tensor.name, tensor.shape) == (name, tuple(values.shape))
        content[name] = tensor.read_raw().copy() if values.ndim > 1 else tensor.read().numpy()
        tensor.release()
    weights.finish()
    return content


def expected(name: str, scheme: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    values = tensors(seed)[name].to(dtype)
    if values.ndim == 1:
        return values.float().numpy()
    if values.shape[1] % 32:
        return values.view(torch.uint8).numpy()
    q4 = scheme == "q4" and name not in (EMBEDDING, HEAD)
    return reference(values.float().numpy(), "q4_1" if q4 else "q8_0")


def assert_expected(content: dict[str, np.ndarray], scheme: str, seed: int = 0, **options) -> None:
    for name, actual in content.items():
        assert np.array_equal(actual, expected(name, scheme, seed, **options)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["q8", "q4"])
def test_the_first_load_and_the_next_give_the_same_bytes(
    scheme: str, dtype: torch.dtype, tmp_path: Path, cache: Path
) -> None:
    folder = save(tmp_path / "model", dtype=dtype)
    for _ in range(2):
        assert_expected(take_all(load(folder, scheme)), scheme, dtype=dtype)
        assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_values_are_those_of_the_blocks_and_any_rows_can_be_read(
    cached: bool, tmp_path: Path, cache: Path
) -> None:
    folder = save(tmp_path / "model")
    if not cached:
        cache.parent.write_text("no folder")
    blocks = expected(PROJECTION, "q4")
    values = gguf.quants.dequantize(blocks, KINDS["q4_1"])
    tensor = load(folder).take(PROJECTION, (64, 64))
    assert isinstance(tensor, MappedTensor if cached else QuantisedTensor)
    assert tensor.format == "q4_1"
    for start, stop in ((0, None), (0, 0), (5, 6), (17, 64)):
        assert np.array_equal(tensor.read(start, stop).numpy(), values[start:stop])
        assert np.array_equal(tensor.read_raw(start, stop), blocks[start:stop])


def test_rows_are_read_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.loading.requantise._CHUNK_BYTES", 64 * 4 * 7)
    lengths = []
    read = MappedTensor.read

    def watched(self: MappedTensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        values = read(self, start, stop)
        lengths.append(len(values) if values.ndim > 1 else 0)
        return values

    monkeypatch.setattr(MappedTensor, "read", watched)
    assert_expected(take_all(load(save(tmp_path / "model"))), "q4")
    assert max(lengths) == 7


def test_a_later_load_reads_no_matrix_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model")
    take_all(load(folder))

    def refuse(*_: object) -> None:
        raise AssertionError("quantised again")

    monkeypatch.setattr(QuantisedTensor, "read_raw", refuse)
    source = folder / "model.safetensors"
    status = source.stat()
    with source.open("r+b") as file:  # destroy the weights; size and time stay
        file.seek(-status.st_size // 2, os.SEEK_END)
        file.write(b"\xff" * (status.st_size // 2))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    weights = load(folder)
    for name in (EMBEDDING, PROJECTION, HEAD):
        blocks = weights.take(name, tuple(tensors()[name].shape)).read_raw()
        assert np.array_equal(blocks, expected(name, "q4"))


def test_the_file_is_a_safetensors_file(tmp_path: Path, cache: Path) -> None:
    take_all(load(save(tmp_path / "model")))
    [file] = cache.iterdir()
    with safe_open(file, framework="numpy") as opened:
        assert np.array_equal(opened.get_tensor(PROJECTION), expected(PROJECTION, "q4"))
        assert opened.metadata()["source"] == str(tmp_path / "model" / "model.safetensors")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if "stay as stored" not in message]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], "cut short"),
        (lambda raw: raw + b"\0", "cut short"),
        (lambda raw: raw[: len(raw) // 2], "cut short"),
        (lambda raw: b"", "is empty"),
        (lambda raw: b"\xff" * 8 + raw[8:], "out of date"),
        (lambda raw: raw[:20] + b"#" + raw[21:], "out of date"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "is damaged"),  # a checksum
        (lambda raw: raw[:-2000] + bytes([raw[-2000] ^ 1]) + raw[-1999:], "is damaged"),
        (lambda raw: raw[:4000] + bytes(len(raw) - 4000), "is damaged"),  # never reached the disk
    ],
)
def test_a_damaged_file_is_written_anew(
    damage, message: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "model")
    take_all(load(folder))
    [file] = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert_expected(take_all(load(folder)), "q4")
    [line] = warnings(caplog)
    assert message in line
    assert str(file) in line
    assert list(cache.iterdir()) == [file]
    assert file.read_bytes() == good


def test_every_bit_counts(tmp_path: Path, cache: Path) -> None:
    folder = save(tmp_path / "model")
    take_all(load(folder))
    [file] = cache.iterdir()
    good = file.read_bytes()
    random = np.random.default_rng(5)
    for position in random.integers(0, len(good), 60):
        bad = bytearray(good)
        bad[position] ^= 1 << int(random.integers(8))
        file.write_bytes(bad)
        assert load(folder)._cached is None, position
    file.write_bytes(good)
    assert load(folder)._cached is not None


def test_another_checkpoint_in_the_same_place_is_quantised_again(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "model")
    take_all(load(folder))
    source = folder / "model.safetensors"
    save(folder, seed=1)
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    assert_expected(take_all(load(folder), seed=1), "q4", seed=1)
    [line] = warnings(caplog)
    assert "out of date" in line
    assert len(list(cache.iterdir())) == 1
    take_all(load(folder, "q8"), seed=1)
    take_all(load(save(tmp_path / "other")))
    assert len(list(cache.iterdir())) == 3  # one per checkpoint and scheme


def test_without_a_place_to_write_loading_goes_on(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert_expected(take_all(load(save(tmp_path / "model"))), "q4")
    [line] = warnings(caplog)
    assert "can't be kept for the next time" in line


@pytest.mark.parametrize("failing", [0, 2, "commit"])
def test_a_disk_that_fills_up_costs_only_the_cache(
    failing, tmp_path: Path, cache: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def add(self: CacheWriter, name: str, chunks):
        nonlocal count
        count += 1
        if count > failing:
            self._file.write(next(iter(chunks))[:1].data)
            full()
        return original(self, name, chunks)

    if failing == "commit":
        monkeypatch.setattr(os, "replace", full)
    else:
        original = CacheWriter.add
        monkeypatch.setattr(CacheWriter, "add", add)
    assert_expected(take_all(load(save(tmp_path / "model"))), "q4")
    [line] = warnings(caplog)
    assert "No space left" in line
    assert list(cache.iterdir()) == []


def test_a_load_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    weights = load(save(tmp_path / "model"))
    weights.take(PROJECTION, (64, 64))
    with pytest.raises(ValueError, match="does not use"):
        weights.finish()
    del weights
    assert list(cache.iterdir()) == []


def test_concurrent_loads_agree(tmp_path: Path, cache: Path) -> None:
    folder = save(tmp_path / "model")
    with ThreadPoolExecutor(4) as pool:
        for content in pool.map(lambda _: take_all(load(folder)), range(12)):
            assert_expected(content, "q4")
    assert len(list(cache.iterdir())) == 1
    first, second = load(folder, "q8"), load(folder, "q8")  # both write
    assert_expected(take_all(first), "q8")
    assert_expected(take_all(second), "q8")
    assert load(folder, "q8")._cached is not None


KILLED = """
import os, signal, sys
import huggingface_hub.constants
sys.path.insert(0, {tests!r})
sys.path.insert(0, {here!r})
huggingface_hub.constants.HF_HOME = {hub!r}
from test_requantise import EMBEDDING, PROJECTION, Path, load
weights = load(Path({folder!r}))
weights.take(EMBEDDING, (50, 64))
weights.take(PROJECTION, (64, 64))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_never_used(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "model")
    here = Path(__file__).parent
    code = KILLED.format(
        tests=str(here.parents[1]), here=str(here), hub=str(tmp_path / "hub"), folder=str(folder)
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    [part] = cache.iterdir()
    assert part.suffix == ".part"
    assert_expected(take_all(load(folder)), "q4")
    assert warnings(caplog) == []
    assert len(list(cache.iterdir())) == 2  # it may be a living process's, so it stays for a day
    yesterday = time.time() - 25 * 3600
    os.utime(part, (yesterday, yesterday))
    save(folder, seed=1)
    take_all(load(folder), seed=1)
    [file] = cache.iterdir()
    assert file.suffix == ".safetensors"


@pytest.mark.parametrize(("scheme", "limit"), [("q8", 65504 * 127.0), ("q4", 65504.0)])
@pytest.mark.parametrize("cached", [True, False])
def test_a_value_beyond_the_blocks_is_refused(
    cached: bool, scheme: str, limit: float, tmp_path: Path, cache: Path
) -> None:
    if not cached:
        cache.parent.write_text("no folder")
    for value, message in (
        (-limit * 1.01, "too large for"),
        (float("nan"), "not finite"),
        (-3e38, "too large for"),
    ):
        changed = tensors()
        changed[PROJECTION][40, 3] = value
        changed[PROJECTION][40, 4] = 3e38 if value == -3e38 else 0.0
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"{PROJECTION}.*{message}"):
            load(folder, scheme).take(PROJECTION, (64, 64)).read()
    changed[PROJECTION][40, 3:5] = torch.tensor([-limit * 0.99, 0])
    save_file(changed, folder / "model.safetensors")
    assert torch.isfinite(load(folder, scheme).take(PROJECTION, (64, 64)).read()).all()


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
def test_float_gguf_files_are_quantised_in_the_hugging_face_order(
    quant: str, tmp_path: Path
) -> None:
    path = save_tiny_gguf(tmp_path, quant=quant, **SIZES)
    [file] = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight"]
    kind = gguf.GGMLQuantizationType[quant]
    values = gguf.quants.dequantize(np.array(file.data), kind).reshape(64, 64)
    for _ in range(2):
        weights = QuantisedWeights(open_checkpoint(str(path)).weights, "q4", context())
        blocks = [weights.take(t.name, t.shape).read_raw() for t in weights._source.takeable()
                  if t.name == PROJECTION]  # fmt: skip
        assert np.array_equal(interleave_rope(blocks[0], 8), reference(values, "q4_1"))


def test_a_quantised_checkpoint_is_refused(tmp_path: Path, cache: Path) -> None:
    path = save_tiny_gguf(tmp_path, quant="Q8_0", **SIZES)
    with pytest.raises(ValueError, match=r"quantised already \(.* is stored as q8_0\): leave"):
        QuantisedWeights(open_checkpoint(str(path)).weights, "q4", context())
    assert not cache.exists()


def test_a_checkpoint_without_whole_groups_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(4, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no matrix with rows in whole groups of 32"):
        load(tmp_path)


def test_matrices_that_stay_are_counted(tmp_path: Path, caplog) -> None:
    load(save(tmp_path / "model"))
    assert "1 of 5 matrices stay as stored" in caplog.text


def test_a_tied_head_that_repeats_the_embedding_is_not_quantised(tmp_path: Path) -> None:
    embedding = torch.randn(5, 32)
    save_file({EMBEDDING: embedding, HEAD: embedding.clone()}, tmp_path / "model.safetensors")
    for _ in range(2):
        weights = load(tmp_path, tied=True)
        raw = weights.take(EMBEDDING, (5, 32)).read_raw()
        assert np.array_equal(raw, reference(embedding.numpy(), "q8_0"))
        weights.finish()
