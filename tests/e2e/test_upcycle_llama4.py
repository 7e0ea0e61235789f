"""tools/upcycle_llama4.py: a Llama 4 checkpoint with the function of a Llama one."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save_tiny_hf
from safetensors.torch import load_file

from eyas.llm import LLM
from eyas.loading.checkpoint import load_tokenizer
from eyas.sampling.params import SamplingParams

TOOL = Path(__file__).parents[2] / "tools" / "upcycle_llama4.py"
EPS = torch.finfo(torch.float32).eps
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PROMPTS = (
    "The capital of Norway is",
    "Once upon a time, a small fox",
    "def fibonacci(n):\n",
    "Water boils at",
    "My grandmother's recipe for bread starts with",
    "The three laws of motion say that",
    "SELECT name, age FROM",
    "Dear Sir or Madam,\n\nI am writing",
    "In 1969, two people",
    "A list of prime numbers: 2, 3, 5, 7,",
)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("upcycle_llama4", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["upcycle_llama4"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def sample() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, 260, (12, 60), generator=generator).tolist()


def upcycled(tool: Any, tmp_path: Path, **options: Any) -> tuple[Path, Path, Any]:
    source = save_tiny_hf(tmp_path, "llama", 0, **options)
    output = tmp_path / "llama4"
    routing = tool.upcycle(str(source), output, num_experts=4, chunk_size=64, sample=sample())
    return source, output, routing


def transformers_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_parameters": LLAMA3, "attention_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 6, "head_dim": 20},
    ],
)
def test_transformers_finds_the_same_function(
    options: dict[str, Any], tool: Any, tmp_path: Path
) -> None:
    """And the routing is as reported."""
    source, output, routing = upcycled(tool, tmp_path, **options)
    before, after = transformers_model(source), transformers_model(output)
    assert isinstance(after, transformers.Llama4ForCausalLM)
    scores: list[list[torch.Tensor]] = [[] for _ in after.model.layers]
    for layer, kept in zip(after.model.layers, scores, strict=True):
        layer.feed_forward.router.register_forward_hook(
            lambda module, inputs, result, kept=kept: kept.append(result[1])
        )
    head = before.get_output_embeddings().weight
    row = float(head.detach().norm(dim=1).max())
    for ids in sample():
        with torch.no_grad():
            wanted = before(torch.tensor([ids]), output_hidden_states=True)
            logits = after(torch.tensor([ids])).logits
        bound = 40 * 3 * EPS * row * wanted.hidden_states[-1][0].norm(dim=1)
        assert ((logits - wanted.logits)[0].abs().amax(dim=1) <= bound).all()
    for kept, shares in zip(scores, routing.shares_LE, strict=True):
        chosen = torch.cat(kept).max(dim=1)
        assert chosen.values.min() > 20
        assert torch.equal(
            torch.bincount(chosen.indices, minlength=4) / len(chosen.indices), shares
        )
        assert shares.min() > 0


def test_experts_differ_in_their_tensors_and_routers_come_in_pairs(
    tool: Any, tmp_path: Path
) -> None:
    source, output, _ = upcycled(tool, tmp_path)
    state: dict[str, torch.Tensor] = {}
    for file in output.glob("*.safetensors"):
        state |= load_file(file)
    block = "model.layers.1.feed_forward"
    gate_up, down = state[f"{block}.experts.gate_up_proj"], state[f"{block}.experts.down_proj"]
    assert (gate_up.shape, down.shape) == ((4, 48, 80), (4, 40, 48))
    for one, other in combinations(range(4), 2):
        assert not torch.equal(gate_up[one], gate_up[other])
        assert not torch.equal(down[one], down[other])
    router = state[f"{block}.router.weight"]
    assert torch.equal(router[0::2], -router[1::2])
    assert json.loads((output / "config.json").read_text())["attention_chunk_size"] == 64
    text = "some text <|im_end|> and more"
    before, after = load_tokenizer(str(source)), load_tokenizer(str(output))
    messages = [{"role": "user", "content": "hello"}]
    assert before.encode(text) == after.encode(text)
    assert before.apply_chat_template(messages) == after.apply_chat_template(messages)
    assert before.eos_token_ids == after.eos_token_ids


def generate(model: str, prompts: Sequence[str], length: int, **options: Any) -> list[Any]:
    """``logprobs`` of the best two, in float32 throughout."""
    types = {"activation_dtype": "float32", "kv_cache_dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=2)
    with LLM(model, **types, **options) as llm:
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


def check_same_text(wanted: Sequence[Any], actual: Sequence[Any], tolerance: float) -> None:
    """Up to where the best two tokens are as near as ``tolerance`` or nearer."""
    for one, other in zip(wanted, actual, strict=True):
        for place, (token, entries) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            best = sorted((entry.logprob for entry in entries.values()), reverse=True)
            if best[0] - best[1] <= tolerance:
                break
            assert other.token_ids[place] == token, place
            assert abs(other.logprobs[place][token].logprob - entries[token].logprob) <= tolerance


def test_eyas_writes_the_same_text_with_and_without_speculation(tool: Any, tmp_path: Path) -> None:
    source, output, _ = upcycled(tool, tmp_path)
    prompts = ["hello hello hello", "a b c a b c a b"]
    options = {"max_model_len": 64, "block_size": 16}
    config = {"method": "ngram", "num_speculative_tokens": 3}
    plain = generate(str(output), prompts, 40, **options)
    check_same_text(generate(str(source), prompts, 40, **options), plain, 1e-3)
    speculative = generate(str(output), prompts, 40, speculative_config=config, **options)
    assert [o.token_ids for o in speculative] == [o.token_ids for o in plain]
    assert [o.logprobs for o in speculative] == [o.logprobs for o in plain]


@pytest.mark.parametrize(
    ("model_type", "options", "num_experts", "message"),
    [
        ("qwen2", {}, 4, "model_type 'qwen2' can't be upcycled"),
        ("llama", {"mlp_bias": True}, 4, "mlp_bias"),
        ("llama", {"intermediate_size": 81}, 4, "intermediate_size 81 is odd"),
        ("llama", {}, 3, "even number"),
        ("llama", {}, 0, "even number"),
        ("llama", {}, 600, "never chosen on 720 sample tokens"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(
    model_type: str,
    options: dict[str, Any],
    num_experts: int,
    message: str,
    tool: Any,
    tmp_path: Path,
) -> None:
    source, output = save_tiny_hf(tmp_path, model_type, 0, **options), tmp_path / "out" / "llama4"
    with pytest.raises(ValueError, match=message):
        tool.upcycle(str(source), output, num_experts=num_experts, sample=sample())
    assert not output.parent.exists()


def test_an_output_is_replaced_only_when_told_to(tool: Any, tmp_path: Path) -> None:
    source, output, _ = upcycled(tool, tmp_path)
    before = (output / "config.json").read_text()
    arguments = [str(source), str(output), "--num-experts", "2", "--chunk-size", "32"]
    assert tool.main(arguments) == 2
    assert (output / "config.json").read_text() == before
    assert tool.main([*arguments, "--overwrite"]) == 0
    config = json.loads((output / "config.json").read_text())
    assert (config["num_local_experts"], config["attention_chunk_size"]) == (2, 32)
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name, output.name]
    other = tmp_path / "notes"
    other.mkdir()
    assert tool.main([str(source), str(other), "--overwrite"]) == 2


@pytest.mark.slow
def test_the_demo_model_as_llama4(tool: Any, tmp_path: Path) -> None:
    """1.6 GB. Its text is the demo model's, every expert is used, and drafts change no bit."""
    output = tmp_path / "llama4"
    routing = tool.upcycle("demo", output)
    assert routing.least_score > 20
    assert routing.shares_LE.shape == (30, 8)
    assert routing.shares_LE.min() > 0.02
    options = {"max_model_len": 1024}
    plain = generate(str(output), PROMPTS, 64, **options)
    check_same_text(generate("demo", PROMPTS, 64, **options), plain, 1e-3)
    config = {"method": "ngram", "num_speculative_tokens": 7}
    speculative = generate(str(output), PROMPTS, 64, speculative_config=config, **options)
    assert [o.token_ids for o in speculative] == [o.token_ids for o in plain]
    assert [o.logprobs for o in speculative] == [o.logprobs for o in plain]
