"""Tiny random checkpoints for tests: a Hugging Face directory, or the same model as a GGUF file.

Both hold a byte-level tokenizer whose first ids are ``SPECIAL_TOKENS``, so that
``LLM(str(path))`` runs end to end. Weights, norms and biases are all random: nothing is 0 or 1.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(model_type: str = "llama", seed: int = 0, **config_overrides: Any) -> Any:
    """A transformers model of ``model_type`` (llama, llama4_text, mistral, qwen2, qwen3), float32,
    in eval mode: 2 layers, hidden size 48, 6 query and 2 key/value heads of 8, vocabulary 260."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    settings.update(config_overrides)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * noise)
                elif parameter.dim() == 1:
                    parameter.copy_(0.3 * noise)
                elif "embed" in name:
                    parameter.copy_(noise)
                else:  # keeps activations near unit size, so that the logits are far from flat
                    parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    return model.eval()


def tiny_vocabulary(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id and merges: the special tokens, then bytes (the printable ASCII ones first, the
    others as far as they fit), then pairs of lower-case letters."""
    alphabet = _byte_characters()
    order = [*range(32, 127), 10, *[b for b in range(256) if not 32 <= b < 127 and b != 10]]
    tokens = [*SPECIAL_TOKENS, *(alphabet[b] for b in order)][:vocab_size]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    merges = [(a, b) for a in letters for b in letters][: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    if len(tokens) != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} exceeds the {len(tokens)} tokens there are")
    return tokens, merges


def tiny_tokenizer(vocab_size: int = 260) -> Tokenizer:
    tokens, merges = tiny_vocabulary(vocab_size)
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return backend


def save_tiny_hf(
    tmp_path: Path, model_type: str = "llama", seed: int = 0, **config_overrides: Any
) -> Path:
    """Saves ``tiny_model`` and its tokenizer to a new directory under ``tmp_path``."""
    import transformers

    path = _new_path(tmp_path, f"{model_type}-{seed}", "")
    model = tiny_model(model_type, seed, **config_overrides)
    model.save_pretrained(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(model.config.vocab_size),
        bos_token="<s>",
        eos_token="</s>",
        # For these two Qwen2's tokenizer class would else add <|endoftext|>, which has no row.
        pad_token="</s>",
        unk_token="</s>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


def save_tiny_gguf(
    tmp_path: Path,
    seed: int = 0,
    quant: str = "F32",
    arch: str = "llama",
    **config_overrides: Any,
) -> Path:
    """Saves the model that ``save_tiny_hf`` would save as a GGUF file (arch llama, llama4, qwen2,
    qwen3), with what llama.cpp takes for granted left out.

    ``quant`` is the type of the 2-D weights (F32, F16, BF16, Q8_0, Q4_1, ...); a block type needs
    input sizes in whole blocks, for instance hidden_size=64, intermediate_size=96,
    num_attention_heads=8.
    """
    gating = config_overrides.pop("gating", 2)
    model = tiny_model("llama4_text" if arch == "llama4" else arch, seed, **config_overrides)
    config, state = model.config, model.state_dict()
    path = _new_path(tmp_path, f"{arch}-{seed}-{quant.lower()}", ".gguf")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if arch == "llama4":
        _add_llama4(writer, config, gating)
        state = _unfuse_experts(state)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, config.vocab_size)

    kind = gguf.GGMLQuantizationType[quant]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = parameter.numpy()
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            values = interleave_rope(values, heads[projection])
        if values.ndim == 1 or projection == "router":
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_llama4(writer: gguf.GGUFWriter, config: Any, gating: int) -> None:
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(gating))
    if config.moe_layers:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.attention_chunk_size != 8192:
        writer.add_sliding_window(config.attention_chunk_size or 0)
    if config.floor_scale != 8192:
        writer.add_attn_temperature_length(config.floor_scale)
        writer.add_attn_temperature_scale(config.attn_scale)


def _unfuse_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's matrices as those of linear layers, gate and up apart."""
    result = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.mT.chunk(2, dim=1)
            result[name.replace("gate_up_proj", "gate_proj.weight")] = gate.contiguous()
            result[name.replace("gate_up_proj", "up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            result[f"{name}.weight"] = value.mT.contiguous()
        else:
            result[name] = value
    return result


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Writes ``tiny_tokenizer`` and the chat template as GGUF metadata."""
    tokens, merges = tiny_vocabulary(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL_TOKENS else 1 for t in tokens])
    if merges:
        writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def interleave_rope(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in GGUF's llama order: within each head, row i of the
    first half and row i of the second half become rows 2i and 2i + 1."""
    rows = values.shape[0]
    half = rows // num_heads // 2
    order = np.empty(rows, dtype=np.int64)
    for head in range(num_heads):
        for i in range(half):
            order[head * 2 * half + 2 * i] = head * 2 * half + i
            order[head * 2 * half + 2 * i + 1] = head * 2 * half + half + i
    return np.ascontiguousarray(values[order])


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte value (Radford et al. 2019, encoder.py)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def _new_path(folder: Path, stem: str, suffix: str) -> Path:
    """A path that does not exist yet, so that one test can save several."""
    path, n = folder / f"{stem}{suffix}", 1
    while path.exists():
        path, n = folder / f"{stem}-{n}{suffix}", n + 1
    return path
