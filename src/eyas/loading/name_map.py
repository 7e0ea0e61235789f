"""GGUF tensor names to Hugging Face names, for the Llama family.

Source: the tensor tables of the ``gguf`` package (``gguf.get_tensor_name_map``), which a test
holds this one against.
"""

import re

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA4_BLOCK = {
    **{stem: name for stem, name in _BLOCK.items() if not name.startswith("mlp.")},
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,8})\.)?([a-z_]+)\.(weight|bias)")

# Frequency factors of llama3-style rope: the loader puts them into the config.
ROPE_FREQS = "rope_freqs.weight"


def hugging_face_name(name: str, arch: str) -> str:
    """The Hugging Face name of a GGUF tensor of architecture ``arch``; a name that is not in the
    tables stays as it is, so that it is reported as unused under the name that the file gives it.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    block = _LLAMA4_BLOCK if arch == "llama4" else _BLOCK
    return f"model.layers.{layer}.{block[stem]}.{kind}" if stem in block else name


def rope_projection(name: str) -> str | None:
    """Which projection a Hugging Face name is: "q", "k", or None if neither of these."""
    match = re.fullmatch(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)", name)
    return match.group(1) if match else None
