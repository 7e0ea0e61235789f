"""Damaged checkpoint files either load or raise a one-line ValueError: never another exception, a
crash, a hang, or memory out of proportion to the file."""

import json
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyas.loading.checkpoint import load_tokenizer, open_checkpoint
from eyas.loading.safetensors import read_directory

MANY_BYTES = 64 << 20
NUMBERS = st.sampled_from(
    [0, 1, 2, 7, 8, 31, 255, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
)
KEYS = [
    *(f"tokenizer.ggml.{x}".encode() for x in ("tokens", "merges", "token_type", "model")),
    *(f"llama.{x}".encode() for x in ("block_count", "embedding_length", "context_length")),
    *(f"llama.attention.{x}".encode() for x in ("head_count", "head_count_kv", "key_length")),
    b"general.architecture",
    b"llama.rope.freq_base",
    b"tokenizer.ggml.eos_token_id",
]
TENSORS = [b"token_embd.weight", b"blk.0.attn_q.weight", b"output_norm.weight"]
fuzz = settings(
    max_examples=80,
    deadline=timedelta(seconds=10),  # far above the usual 20 ms: a hang
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return save_tiny_gguf(
        folder,
        quant="Q4_0",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
    )


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(5).half(), "c": torch.ones(()).half()}, path)
    return path


Edit = tuple[float, str, int]


def edits(head: float) -> st.SearchStrategy[list[Edit]]:
    """A few changes: where (as a fraction of the file, often within the first ``head`` of it),
    what kind, and a number."""
    where = st.floats(0, head) | st.floats(0, 1)
    kinds = st.sampled_from(["byte", "bit", "u32", "u64", "cut", "copy", "end"])
    return st.lists(st.tuples(where, kinds, NUMBERS | st.integers(0, 255)), min_size=1, max_size=3)


def damaged(whole: bytes, changes: list[Edit]) -> bytes:
    data = bytearray(whole)
    for fraction, kind, number in changes:
        at = int(fraction * len(data))
        if kind == "byte":
            data[at : at + 1] = bytes([number % 256])
        elif kind == "bit" and at < len(data):
            data[at] ^= 1 << number % 8
        elif kind == "u32":
            data[at : at + 4] = (number % 2**32).to_bytes(4, "little")
        elif kind == "u64":
            data[at : at + 8] = number.to_bytes(8, "little")
        elif kind == "cut":
            del data[at : at + number % 256]
        elif kind == "copy":
            data[at:at] = data[at : at + number % 256]
        elif kind == "end":
            del data[at:]
    return bytes(data)


def load_all(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    for tensor in checkpoint.weights._tensors.values():  # type: ignore[attr-defined]
        values = tensor.read()
        assert tuple(values.shape) == tensor.shape
        tensor.release()


def check(action: Any, argument: Path) -> None:
    """Runs ``action``; a ValueError must be one line, and memory must stay in bounds."""
    tracemalloc.reset_peak()
    refused = None
    try:
        action(argument)
    except ValueError as error:
        refused = error
    assert refused is None or (type(refused) is ValueError and "\n" not in str(refused))
    assert tracemalloc.get_traced_memory()[1] < MANY_BYTES


@pytest.fixture(autouse=True)
def _traced() -> Any:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@fuzz
@given(changes=edits(0.4))
def test_damaged_gguf(tmp_path: Path, gguf_file: Path, changes: list[Edit]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged(gguf_file.read_bytes(), changes))
    check(load_all, path)
    check(lambda p: load_tokenizer(str(p)).encode("a b"), path)


@fuzz
@given(
    name=st.sampled_from([*KEYS, *TENSORS]),
    distance=st.integers(-16, 40),
    number=NUMBERS,
    size=st.sampled_from([4, 8]),
)
def test_damaged_gguf_fields(
    tmp_path: Path, gguf_file: Path, name: bytes, distance: int, number: int, size: int
) -> None:
    """Numbers right behind a name: value types, counts, dimensions, tensor types, offsets."""
    whole = gguf_file.read_bytes()
    at = whole.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + distance
    changed = (number % 2 ** (8 * size)).to_bytes(size, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:at] + changed + whole[at + size :])
    check(load_all, path)
    check(lambda p: load_tokenizer(str(p)).encode("a b"), path)


def read_all(directory: Path) -> None:
    for tensor in read_directory(directory):
        assert tuple(tensor.read().shape) == tensor.shape


@fuzz
@given(changes=edits(0.9))
def test_damaged_safetensors(tmp_path: Path, safetensors_file: Path, changes: list[Edit]) -> None:
    whole = safetensors_file.read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damaged(whole, changes))
    check(read_all, tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.sampled_from(["F32", "F16", "I8", "", "x", "two\nlines"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@fuzz
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", "", "two\nlines"]),
        JSON
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F4"]) | JSON,
                "shape": st.lists(NUMBERS | st.integers(-1, 3), max_size=3) | JSON,
                "data_offsets": st.lists(NUMBERS | st.integers(0, 32), max_size=3) | JSON,
            }
        ),
    ),
    body=st.integers(0, 40),
)
def test_invented_safetensors_headers(tmp_path: Path, header: Any, body: int) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(body)
    (tmp_path / "model.safetensors").write_bytes(content)
    check(read_all, tmp_path)


@fuzz
@given(index=JSON | st.fixed_dictionaries({"weight_map": JSON}))
def test_invented_indexes(tmp_path: Path, safetensors_file: Path, index: Any) -> None:
    (tmp_path / "x").write_bytes(safetensors_file.read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(read_all, tmp_path)
