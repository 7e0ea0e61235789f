"""Turn a Llama checkpoint into a Llama 4 checkpoint that computes the same function.

    python tools/upcycle_llama4.py demo ~/llama4 --chunk-size 8192

Published Llama 4 models don't fit a small machine, and random ones say nothing about speculation.
This makes one that has every moving part and writes sensible text (after Komatsuzaki et al. 2023,
"Sparse Upcycling"):

* the rows of the query and key projections change places, from halves to interleaved pairs;
* each MLP's neurons go half into the shared expert, half into every routed expert, in another order
  in each: the tensors differ, and their function doesn't;
* a layer's routers come in pairs r, -r, so that the greatest score is never negative. They are
  random, but orthogonal to the mean and the dominant directions of what the layer sees on sample
  text, so that tokens spread over the experts, and so long that the chosen score's sigmoid is 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.cli.datasets import load_prompts, prompt_token_ids
from eyas.loading.checkpoint import Checkpoint, load_tokenizer, open_checkpoint

_LEAST_SCORE = 20.0  # its sigmoid is 1 in float32
_MARGIN = 2.0  # on the sample, for text that isn't in it
_NUM_DIRECTIONS = 4
_INDEX = "model.safetensors.index.json"
_KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
)


@dataclass(frozen=True)
class Routing:
    """What the routers do on the sample text: the least score of a chosen expert, and the share of
    each expert, by layer and expert."""

    least_score: float
    shares_LE: torch.Tensor


def upcycle(
    model: str,
    output: Path,
    *,
    num_experts: int = 8,
    chunk_size: int | None = None,
    seed: int = 0,
    sample: Sequence[Sequence[int]] | None = None,
    overwrite: bool = False,
) -> Routing:
    """Write the Llama 4 checkpoint of ``model`` to the directory ``output``; ``overwrite`` allows
    a checkpoint there, and replaces it. ``chunk_size`` None: the longest context. ``sample``: token
    ids of texts; None: the built-in prompts.

    ValueError, and nothing written, for a model that can't be had as Llama 4, or if the routers
    leave an expert unused.
    """
    if output.exists() and not (overwrite and (output / _INDEX).is_file()):
        raise ValueError(f"{output} exists: give another output directory")
    if num_experts < 2 or num_experts % 2:
        raise ValueError(f"{num_experts} experts: routers come in pairs, so give an even number")
    checkpoint = open_checkpoint(model)
    config = _llama4_config(checkpoint.config, num_experts, chunk_size)
    tokenizer = load_tokenizer(checkpoint)
    state = {tensor.name: tensor.read() for tensor in checkpoint.weights.takeable()}
    if sample is None:
        sample = prompt_token_ids(tokenizer, load_prompts(None), chat_template=True)
    generator = torch.Generator().manual_seed(seed)
    seen = _layer_inputs(checkpoint, state, sample)
    routers = [_make_router(inputs_TH, num_experts, generator) for inputs_TH in seen]
    routing = _measure(routers, seen)
    if bool((routing.shares_LE == 0).any()):
        raise ValueError(
            f"an expert is never chosen on {len(seen[0])} sample tokens: give fewer experts, more "
            f"text, or another seed"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.", dir=output.parent) as folder:
        part = Path(folder) / "model"
        part.mkdir()
        _write(part, config, state, routers, generator)
        tokenizer.save(part)
        if output.exists():
            output.rename(Path(folder) / "old")
        part.rename(output)
    return routing


def _llama4_config(
    config: dict[str, Any], num_experts: int, chunk_size: int | None
) -> dict[str, Any]:
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']!r} can't be upcycled: only 'llama' can")
    for key in ("mlp_bias", "rope_freq_factors", "sliding_window"):
        if config.get(key):
            raise ValueError(f"a model with {key} can't be upcycled: Llama 4 has nothing like it")
    size, num_layers = config["intermediate_size"], config["num_hidden_layers"]
    if size % 2:
        raise ValueError(f"intermediate_size {size} is odd: it can't be split into halves")
    heads = config["num_attention_heads"]
    return {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        **{key: config[key] for key in _KEPT if config.get(key) is not None},
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "dtype": "float32",
        "intermediate_size": size // 2,
        "intermediate_size_mlp": size,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "moe_layers": list(range(num_layers)),
        "no_rope_layers": [1] * num_layers,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": chunk_size or config["max_position_embeddings"],
    }


def _layer_inputs(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], sample: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """What each layer's MLP sees of the sample's tokens: [T, H] per layer."""
    import transformers

    config = transformers.LlamaConfig(
        **{k: v for k, v in checkpoint.config.items() if v is not None}
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    head = {"lm_head.weight": state.get("lm_head.weight", state["model.embed_tokens.weight"])}
    model.load_state_dict({**state, **head}, assign=True)
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, kept in zip(model.model.layers, seen, strict=True):
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, inputs, result_1TH, kept=kept: kept.append(result_1TH[0])
        )
    with torch.inference_mode():
        for ids in sample:
            model.model(torch.tensor([list(ids)]))
    return [torch.cat(kept) for kept in seen]


def _make_router(
    inputs_TH: torch.Tensor, num_experts: int, generator: torch.Generator
) -> torch.Tensor:
    """[E, H]: row 2i + 1 is minus row 2i."""
    wide_TH = inputs_TH.double()
    mean_H = wide_TH.mean(dim=0)
    directions = torch.linalg.svd(wide_TH - mean_H, full_matrices=False).Vh[:_NUM_DIRECTIONS]
    basis = torch.linalg.qr(torch.cat([mean_H[None], directions]).T).Q
    rows = torch.randn(num_experts // 2, len(mean_H), generator=generator, dtype=torch.float64)
    rows -= (rows @ basis) @ basis.T
    rows /= rows.norm(dim=1, keepdim=True)
    least = (wide_TH @ rows.T).abs().amax(dim=1).min()
    rows *= _MARGIN * _LEAST_SCORE / least
    return torch.stack([rows, -rows], dim=1).reshape(num_experts, -1).float()


def _measure(routers: Sequence[torch.Tensor], seen: Sequence[torch.Tensor]) -> Routing:
    least, shares = float("inf"), []
    for router_EH, inputs_TH in zip(routers, seen, strict=True):
        chosen = (inputs_TH @ router_EH.T).max(dim=1)
        least = min(least, float(chosen.values.min()))
        counts = torch.bincount(chosen.indices, minlength=len(router_EH))
        shares.append(counts / len(inputs_TH))
    assert least > _LEAST_SCORE, least
    return Routing(least, torch.stack(shares))


def _write(
    folder: Path,
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    routers: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> None:
    """One file per layer, one for the rest, their index, and the config."""
    prefix = "model.layers."
    shards = [{name: value for name, value in state.items() if not name.startswith(prefix)}]
    for number, router in enumerate(routers):
        block = f"{prefix}{number}."
        own = {
            name.removeprefix(block): value
            for name, value in state.items()
            if name.startswith(block)
        }
        layer = _llama4_layer(own, config, router, generator)
        shards.append({f"{block}{name}": value for name, value in layer.items()})
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: value.contiguous() for name, value in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _llama4_layer(
    layer: dict[str, torch.Tensor],
    config: dict[str, Any],
    router_EH: torch.Tensor,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    result = {name: value for name, value in layer.items() if not name.startswith("mlp.")}
    for name in [name for name in result if name.startswith(("self_attn.q_", "self_attn.k_"))]:
        result[name] = _interleave(result[name], config["head_dim"])

    gate, up, down = (layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    size = config["intermediate_size"]
    shared, routed = torch.randperm(2 * size, generator=generator).split(size)
    orders = [routed[torch.randperm(size, generator=generator)] for _ in router_EH]
    block = "feed_forward"
    return {
        **result,
        f"{block}.router.weight": router_EH,
        f"{block}.shared_expert.gate_proj.weight": gate[shared],
        f"{block}.shared_expert.up_proj.weight": up[shared],
        f"{block}.shared_expert.down_proj.weight": down[:, shared],
        f"{block}.experts.gate_up_proj": torch.stack(
            [torch.cat([gate[order], up[order]]).T for order in orders]
        ),
        f"{block}.experts.down_proj": torch.stack([down[:, order].T for order in orders]),
    }


def _interleave(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows i and i + D/2 of each head, which rope turns together, become rows 2i and 2i + 1."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", help="a Llama model: a directory, a GGUF file, a Hub id, or demo")
    parser.add_argument("output", type=Path, help="the directory to write")
    parser.add_argument("--num-experts", type=int, default=8, metavar="E", help="an even number")
    parser.add_argument(
        "--chunk-size", type=int, metavar="C", help="of attention; none is the longest context"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--overwrite", action="store_true", help="replace the output directory")
    args = parser.parse_args(arguments)
    try:
        routing = upcycle(
            args.model,
            args.output.expanduser(),
            num_experts=args.num_experts,
            chunk_size=args.chunk_size,
            seed=args.seed,
            overwrite=args.overwrite,
        )
    except ValueError as error:
        print(f"upcycle_llama4: {error}", file=sys.stderr)
        return 2
    shares_LE = 100 * routing.shares_LE
    print(f"{args.output}: {len(shares_LE)} layers of {args.num_experts} experts")
    print(f"smallest chosen score on the sample: {routing.least_score:.1f}")
    print(f"shares of the experts: {', '.join(f'{s:.1f}%' for s in shares_LE.mean(dim=0))}")
    print(f"in a layer: from {shares_LE.min():.1f}% to {shares_LE.max():.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
