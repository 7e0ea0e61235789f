"""Writes a GGUF file's weights as a Hugging Face directory: for engines that read no GGUF.

The values are the file's own, dequantised and then rounded to the type asked for. There is no
tokenizer: such an engine is given token ids.

    python benchmarks/make_safetensors.py                        # the demo model in bfloat16
    python benchmarks/make_safetensors.py --model FILE.gguf --dtype float32
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.gguf import GGUFFile
from eyas.loading.name_map import hugging_face_name

DEFAULT_FOLDER = Path("~/.cache/eyas/bench-models").expanduser()
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", default="demo", help="a GGUF file (default: the demo model)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"default: in {DEFAULT_FOLDER}")
    options = parser.parse_args()
    output = options.output or DEFAULT_FOLDER / f"{Path(options.model).stem}-{options.dtype}"
    try:
        write(options.model, options.dtype, output)
    except ValueError as error:
        sys.exit(f"make_safetensors: {error}")
    print(output)


def write(model: str, dtype: str, output: Path) -> None:
    """ValueError for a model that can't be opened, or that such a directory can't describe."""
    checkpoint = open_checkpoint(model)
    if not isinstance(checkpoint.source, GGUFFile):
        raise ValueError(f"{model} is no GGUF file: use it as it is")
    config = {name: value for name, value in checkpoint.config.items() if value is not None}
    if "rope_freq_factors" in config:
        raise ValueError(f"{model} holds rope factors, which a Hugging Face config has no key for")
    config |= {"architectures": [_CLASSES[config["model_type"]]], "torch_dtype": dtype}
    tensors = {}
    for entry in checkpoint.source.tensors.values():
        name = hugging_face_name(entry.name)
        stored = checkpoint.weights.take(name, entry.shape)
        tensors[name] = stored.read().to(getattr(torch, dtype))
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    # Last: a directory with a config is a complete one.
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
