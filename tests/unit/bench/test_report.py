"""The generated documentation is what the committed JSON says."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.report import BEGIN, END, documents, readme_table, replace_between_markers, section
from eyas.bench.report_kernels import kernel_table

ROOT = Path(__file__).parents[3]


def side(rate: float) -> dict[str, Any]:
    return {"tok_per_s": rate, "runs": {"tok_per_s": [rate]}}


def pair(ours: float, theirs: float) -> dict[str, Any]:
    return {"eyas": side(ours), "transformers": side(theirs), "ratio": ours / theirs}


def result(kind: str, **more: Any) -> dict[str, Any]:
    """20 GB/s, and 400 MB of weights: 50 tokens a second."""
    return {
        "kind": kind,
        "date": "2024-02-03",
        "commit": "abc",
        "machine": {
            "cpu": "Some CPU",
            "cores": 2,
            "instruction_sets": ["avx2"],
            "memory_gib": 8.0,
            "system": "Linux x86_64",
        },
        "threads": 2,
        "versions": {"python": "3.11.7"},
        "model": "demo",
        "format": "q4_1",
        "repeats": 3,
        "limits": {"read_bytes_per_s": 2e10, "int8_mac_per_s": 2e11, "float_mac_per_s": 1e11},
        "size": {"weight_bytes": 400_000_000, "step_weight_bytes": 400_000_000},
        **more,
    }


def peers(**workloads: Any) -> dict[str, Any]:
    """llama.cpp in two variants, of which each is better at something; OpenVINO doesn't load."""
    return result(
        "peers",
        kv_bytes_per_token=1_000_000,
        variants={
            "eyas": {"peer": "eyas"},
            "llama_cpp": {"peer": "llama_cpp", "settings": {"repack": True}},
            "llama_cpp_2": {"peer": "llama_cpp", "settings": {"repack": False}},
        },
        failed={"openvino_pa": "unsupported type"},
        llama_cpp_search=[{}] * 7,
        workloads=workloads,
    )


def decode(ours: float, first: float, second: float) -> dict[str, Any]:
    engines = {"eyas": side(ours), "llama_cpp": side(first), "llama_cpp_2": side(second)}
    return {"prompt_tokens": 64, "output_tokens": 72, "engines": engines, "busiest_idle": 0.01}


def test_committed_documents_follow_from_committed_results() -> None:
    texts = documents(ROOT / "benchmarks" / "results", ROOT / "README.md")
    hint = "run: eyas bench report"
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page == texts["benchmarks"], hint
    assert (ROOT / "README.md").read_text(encoding="utf-8") == texts["readme"], hint


def test_speeds_stand_beside_the_machines_limits() -> None:
    entry = {"output_tokens": 64, **pair(25.0, 50.0)}
    prefill = [{"prompt_tokens": 512, **pair(400.0, 200.0)}]
    text = section(result("workloads", decode=entry, prefill=prefill))
    assert "reading memory 20.0 GB/s" in text
    assert "allows 50 tok/s" in text
    assert "| 25.0 | 50.0 | 0.50 | 50% |" in text
    assert "| 400.0 | 200.0 | 2.00 |" in text


def test_the_better_variant_of_a_peer_counts_and_kv_is_in_the_bound() -> None:
    """100 tokens of context of 1 MB each: 500 MB, so 40 tokens a second."""
    text = section(peers(decode=decode(30.0, 10.0, 15.0)))
    assert "| decode, 1 request | 30.0 | 15.0 | 2.00 | 75% |" in text
    assert "openvino_pa: did not load this file: unsupported type" in text
    assert "best of 7 tried" in text
    assert "at most 1% of a core" in text


def test_a_long_context_gives_prefill_and_decode() -> None:
    engines = {
        "eyas": {"tok_per_s": 4.0, "prefill_tok_per_s": 300.0},
        "llama_cpp": {"tok_per_s": 2.0, "prefill_tok_per_s": 100.0},
    }
    entry = {"prompt_tokens": 4096, "output_tokens": 64, "engines": engines}
    text = section(peers(context_4096=entry))
    assert "| prefill, 4096 tokens | 300.0 | 100.0 | 3.00 |  |" in text
    assert "| decode after 4096 tokens | 4.0 | 2.0 | 2.00 |" in text


def test_the_cost_of_more_tokens_is_relative_to_one() -> None:
    engines = {"eyas": {"1": 0.002, "4": 0.003, "runs": {}}, "llama_cpp": {"1": 0.01, "4": 0.03}}
    text = section(peers(forward={"context_tokens": 128, "engines": engines}))
    assert "| 4 | 3.00 | 1.50 | 30.00 | 3.00 |" in text


def test_memory_is_told_apart() -> None:
    memory = {
        "peak": {"eyas": 900_000_000 + (100 << 20), "llama_cpp": 500 << 20},
        "import_torch": 500_000_000,
        "kv_cache_memory": 256 << 20,
    }
    assert "Eyas has 100 MiB beside them" in section(peers(memory=memory))


def test_kernels_are_held_against_the_limits() -> None:
    def timing(rows: int, seconds: float) -> dict[str, Any]:
        operations = rows * 10**6
        return {
            "rows": rows,
            "seconds": seconds,
            "bytes": 10**6,
            "operations": operations,
            "copies": 3,
            "cold": rows == 1,
        }

    linear = [
        {
            "name": f"linear {layer}",
            "kernel": "linear",
            "model": "demo",
            "layer": layer,
            "format": "q4_1",
            "activations": "int8",
            "timings": [timing(1, 1e-4), timing(8, 2e-4)],
        }
        for layer in ("qkv", "attention_out", "gate_up", "down")
    ]
    attention = {
        "name": "attention",
        "kernel": "attention",
        "model": "demo",
        "context": 512,
        "timings": [timing(1, 1e-4)],
    }
    norm = {"name": "norm", "kernel": "norm", "model": "demo", "timings": [timing(1, 1e-6)]}
    run = result("kernels", groups=[*linear, attention, norm], hot=False, instruction_set="avx2")
    text = section(run)
    assert "| Q4_1 | int8 | 400 | 50% |  | 2.00 | 20% |  |  |" in text
    assert "| 512 | 100 |  |  |  |  | 50% | 10% (M = 1) |" in text
    assert "| norm | 1.0 |" in text
    assert "M    8      200.0 us     5.0 GB/s  25%    40.0 G/s  20%  (not cold)" in kernel_table(
        run
    )


def test_overhead_and_quality_are_told() -> None:
    overhead = result(
        "overhead",
        step=1e-3,
        native=9.5e-4,
        sampling=3e-5,
        engine=2e-5,
        overhead=0.05,
        kernels={"norm": 5e-5, "linear": 9e-4},
        prompt_tokens=64,
        output_tokens=129,
    )
    text = section(overhead)
    assert "5.0% of it is outside the native programs" in text
    assert text.index("kernel: linear | 900 | 90.0%") < text.index("kernel: norm")
    eyas = {
        "tokens": 1000,
        "reference_perplexity": 20.0,
        "perplexity": 20.02,
        "change": 0.001,
        "mean_kl": 1e-4,
        "same_top_token": 0.99,
    }
    text = section(result("quality", eyas=eyas, windows=1, window=1001))
    assert "| by default | 20.0200 | +0.100% |" in text
    assert "1.00e-04 nats" in text


def test_the_readme_gets_ratios_of_the_demo_model() -> None:
    memory = {"eyas": 300 * 2**20, "transformers": 600 * 2**20}
    other = {**peers(decode=decode(1.0, 1.0, 1.0)), "model": "other.gguf"}
    text = readme_table(
        [peers(decode=decode(30.0, 10.0, 15.0)), other, result("workloads", memory=memory)]
    )
    assert "| plain decoding, one request | 30 tok/s: 2.0 x llama.cpp |" in text
    assert "| peak memory | 300 MiB: 0.50 x transformers |" in text
    assert "demo model (Q4_1)" in text


def test_only_the_text_between_the_markers_changes() -> None:
    text = f"a\n{BEGIN}\nold\n{END}\nb\n"
    assert replace_between_markers(text, "new\n", "x") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    with pytest.raises(ValueError, match="x: needs the lines"):
        replace_between_markers("no markers", "new", "x")


def test_results_without_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no benchmark JSON"):
        documents(tmp_path, ROOT / "README.md")


def test_committed_results_say_where_they_come_from() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        run = json.loads(file.read_text())
        assert {"kind", "date", "commit", "machine", "threads", "versions"} <= run.keys()
        assert run["commit"] != "unknown"
