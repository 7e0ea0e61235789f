"""What every section of the report is made of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PEER_NAMES = {
    "eyas": "Eyas",
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO",
    "vllm_cpu": "vLLM",
    "transformers": "transformers",
}


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def machine_name(run: Mapping[str, Any]) -> str:
    """The processor and the number of threads."""
    return f"{run['machine']['cpu']}, {threads(run)}"


def threads(run: Mapping[str, Any]) -> str:
    return "1 thread" if run["threads"] == 1 else f"{run['threads']} threads"


def model_name(run: Mapping[str, Any]) -> str:
    """The model's name and its weights' format, once."""
    name = str(run["model"]).rpartition("/")[2].removesuffix(".gguf")
    stored = run.get("format", "")
    return name if stored in name.lower() else f"{name} ({stored.upper()})"


def origin(run: Mapping[str, Any]) -> str:
    """A line that says where and when a run was made."""
    versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
    machine = run["machine"]
    repeats = f"; {run['repeats']} repeats" if "repeats" in run else ""
    return (
        f"{run['date']}, commit {run['commit']}, {machine['system']},"
        f" {machine['memory_gib']} GiB, {' '.join(machine['instruction_sets'])}; {versions}"
        f"{repeats}.\n"
    )


def limits(run: Mapping[str, Any]) -> str:
    """A line about the machine's limits, and what reading allows the model where there is one."""
    limit = run["limits"]
    text = (
        f"Limits of the machine, measured with {threads(run)}: reading memory"
        f" {limit['read_bytes_per_s'] / 1e9:.1f} GB/s, multiply-adds of int8"
        f" {limit['int8_mac_per_s'] / 1e9:.0f} G/s, of float32"
        f" {limit['float_mac_per_s'] / 1e9:.0f} G/s."
    )
    if "size" in run:
        text += (
            f" Reading the {run['size']['step_weight_bytes'] / 1e6:.1f} MB of weights once per"
            f" token allows {decode_bound(run):.0f} tok/s."
        )
    return text + "\n"


def decode_bound(run: Mapping[str, Any], context: float = 0) -> float:
    """Tokens per second that reading the weights and the KV of ``context`` tokens allows."""
    read = run["size"]["step_weight_bytes"] + context * run.get("kv_bytes_per_token", 0)
    return float(run["limits"]["read_bytes_per_s"] / read)


def mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
