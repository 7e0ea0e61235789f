"""The generated documentation is what the committed JSON says."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.report import BEGIN, END, documents, readme_table, replace_between_markers, section

ROOT = Path(__file__).parents[3]


def side(rate: float) -> dict[str, Any]:
    return {"tok_per_s": rate, "runs": [rate]}


def pair(ours: float, theirs: float) -> dict[str, Any]:
    return {"eyas": side(ours), "transformers": side(theirs), "ratio": ours / theirs}


def result(**more: Any) -> dict[str, Any]:
    return {
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
        "repeats": 3,
        "limits": {"read_bytes_per_s": 2e10, "gemm_flop_per_s": 1e11},
        "parameters": 100_000_000,
        **more,
    }


def test_committed_documents_follow_from_committed_results() -> None:
    texts = documents(ROOT / "benchmarks" / "results", ROOT / "README.md")
    hint = "run: eyas bench report"
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == texts["benchmarks"], (
        hint
    )
    assert (ROOT / "README.md").read_text(encoding="utf-8") == texts["readme"], hint


def test_speeds_stand_beside_the_machines_limits() -> None:
    """20 GB/s over 400 MB is 50 tokens a second; 100 GFLOP/s over 200 MFLOP is 500."""
    decode = {"output_tokens": 64, **pair(25.0, 50.0)}
    prefill = [{"prompt_tokens": 512, **pair(400.0, 200.0)}]
    text = section(result(decode=decode, prefill=prefill))
    assert "allows 50.0 tok/s, multiplying by each of them 500 tok/s" in text
    assert "| 25.0 | 50.0 | 0.50 | 50% of reading |" in text
    assert "| 400.0 | 200.0 | 2.00 | 80% of multiplying |" in text


def test_the_readme_gets_ratios() -> None:
    decode = {"output_tokens": 64, **pair(60.0, 50.0)}
    memory = {"eyas": 300 * 2**20, "transformers": 600 * 2**20}
    table = readme_table(result(decode=decode, memory=memory))
    assert "| 1.20 x transformers (60 tok/s) |" in table
    assert "| 0.50 x transformers (300 MiB) |" in table


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
        assert {"date", "commit", "machine", "threads", "versions", "limits"} <= run.keys()
        assert run["commit"] != "unknown"
