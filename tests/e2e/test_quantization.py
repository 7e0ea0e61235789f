"""LLM(quantization=...): the same bits as a GGUF file that holds the same blocks."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from checkpoints import save_tiny_gguf
from harness import tiny_checkpoint

from eyas import LLM, SamplingParams
from eyas.cli.main import main
from eyas.engine.output import RequestOutput

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
PARAMS = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=3, logprobs=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "eyas" / "quantised"


def checkpoint(model_type: str = "llama") -> str:
    return str(tiny_checkpoint(model_type, 0, tuple(SIZES.items())))


def outputs(model: str, **options) -> list[RequestOutput]:
    with LLM(model, use_tqdm_on_load=False, kv_cache_memory=8 << 20, **options) as llm:
        return llm.generate(["the cat sat", "abc abc abc"], PARAMS, use_tqdm=False)


def samples(model: str, **options) -> list:
    return [output.outputs for output in outputs(model, **options)]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_q8_equals_the_gguf_file_with_the_same_blocks(
    arch: str, tmp_path: Path, cache: Path
) -> None:
    gguf = save_tiny_gguf(tmp_path, quant="Q8_0", arch=arch, **SIZES)
    expected = samples(str(gguf))
    first = samples(checkpoint(arch), quantization="q8")
    [file] = cache.iterdir()
    written = file.stat().st_mtime_ns
    assert first == samples(checkpoint(arch), quantization="q8") == expected
    assert file.stat().st_mtime_ns == written
    assert first != samples(checkpoint(arch))
    float_gguf = save_tiny_gguf(tmp_path, quant="F32", arch=arch, **SIZES)
    assert samples(str(float_gguf), quantization="q8") == expected


def test_q4_gives_the_same_bits_with_the_cache_file_and_without(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    without = samples(checkpoint(), quantization="q4")
    cache.parent.unlink()
    first, later = (samples(checkpoint(), quantization="q4") for _ in range(2))
    assert without == first == later
    assert len(list(cache.iterdir())) == 1
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    assert samples(checkpoint(), quantization="q4", speculative_config=speculative) == first
    reference = outputs(checkpoint(), quantization="q4", ops="reference", max_model_len=64)
    assert all(len(output.outputs[0].token_ids) == 16 for output in reference)


def test_commands_take_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "abc", "--model", checkpoint(), "--max-tokens", "4"]
    assert main([*line, "--quantization", "q8"]) == 0
    assert capsys.readouterr().out
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "awq"}, "quantization is 'awq': use one of q8, q4, or None"),
        ({"quantization": "q8", "dtype": "bfloat16"}, "leave the other out"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outputs(checkpoint(), **options)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    gguf = str(save_tiny_gguf(tmp_path, quant="Q4_1", **SIZES))
    with pytest.raises(ValueError, match="is quantised already"):
        outputs(gguf, quantization="q8")
