"""From measurements to the numbers in the JSON."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.bench import llama_search, results
from eyas.bench.kernel_shapes import SHAPES, RandomWeight
from eyas.bench.kernels import FORMATS
from eyas.bench.overhead import combine
from eyas.bench.peers import decode_rate
from eyas.bench.quality import Divergence, describe
from eyas.bench.report_kernels import layer_totals


def test_a_batchs_decode_rate_leaves_the_prefill_out() -> None:
    assert decode_rate(8, 11, {"first_seconds": 1.0, "seconds": 3.0}) == 8 * 10 / 2
    assert decode_rate(8, 11, {"first_seconds": 3.0, "seconds": 3.0}) is None


def test_a_step_is_divided_into_kernels_sampling_and_engine() -> None:
    profile = {"step": 10.0, "executor": 9.0, "kernels": {"linear": 5.0, "norm": 3.0}}
    parts = combine([profile] * 3)
    assert parts["native"] == 8
    assert parts["sampling"] == 1
    assert parts["engine"] == 1
    assert parts["overhead"] == pytest.approx(0.2)
    assert parts["kernels"] == {"linear": 5.0, "norm": 3.0}


def test_perplexity_and_divergence_of_known_distributions() -> None:
    """Two tokens; the reference gives them 1/2 each, the other side 3/4 and 1/4."""
    total = Divergence()
    reference = np.zeros((2, 2), np.float32)
    other = np.log(np.array([[0.75, 0.25]] * 2, np.float32)) + 5  # a constant changes nothing
    total.add(reference, other, [0, 0])
    found = describe(total)
    assert found["reference_perplexity"] == pytest.approx(2)
    assert found["perplexity"] == pytest.approx(4 / 3)
    assert found["change"] == pytest.approx(-1 / 3)
    assert found["mean_kl"] == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_llama_cpp_runs_with_its_best_settings_for_each_goal() -> None:
    def one(name: str, decode: float, prefill: float) -> dict[str, Any]:
        return {"settings": {"name": name}, "decode": decode, "prefill": prefill}

    tried = [one("a", 1, 5), one("b", 3, 1), one("c", 2, 2)]
    assert llama_search.best(tried) == [{"name": "b"}, {"name": "a"}]
    assert llama_search.best([*tried, one("d", 9, 9)]) == [{"name": "d"}]


def test_the_search_keeps_what_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything is faster without repacking, and nothing else matters."""

    class Machine:
        def __init__(self, command: Any, **settings: Any) -> None:
            self.seconds = 2.0 if settings["repack"] else 1.0

        def do(self, task: str, **arguments: Any) -> float:
            return self.seconds

        def __enter__(self) -> "Machine":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(llama_search, "Worker", Machine)
    tried = llama_search.search(["x"], {"model": "m"})
    assert all(one["settings"]["repack"] is False for one in tried[1:])
    assert llama_search.best(tried) == [tried[1]["settings"]]


def test_matrices_of_a_layer_are_added_where_all_were_timed() -> None:
    def timing(rows: int, seconds: float) -> dict[str, Any]:
        return {"rows": rows, "seconds": seconds, "bytes": 10, "operations": 100}

    groups = [{"timings": [timing(1, 1.0), timing(512, 5.0)]}, {"timings": [timing(1, 2.0)]}]
    assert layer_totals(groups) == {1: {"seconds": 3.0, "bytes": 20, "operations": 200}}


@pytest.mark.parametrize("format", FORMATS)
def test_random_weights_hold_ordinary_numbers(format: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    weight = RandomWeight(4, 512, format)
    values = dequantize(weight.read_raw(), GGMLQuantizationType[format.upper()])
    assert values.shape == (4, 512)
    assert np.isfinite(values).all()
    assert (np.abs(values[values != 0]) > 1e-30).all()  # nothing subnormal


def test_the_shapes_are_the_models() -> None:
    parameters = {
        name: sum(n * k for layer, (n, k) in shape.linear.items() if layer != "head")
        for name, shape in SHAPES.items()
    }
    assert parameters["demo"] * 30 == 106_168_320
    assert parameters["llama-3.2-1b"] * 16 == 973_078_528


@pytest.mark.parametrize(
    ("kind", "model", "format", "name"),
    [
        ("workloads", "demo", "q4_1", "demo-2-cores.json"),
        ("peers", "demo", "q4_1", "peers-demo-q4_1-2-cores.json"),
        ("peers", "/x/demo-Q8_0.gguf", "q8_0", "peers-demo-q8_0-2-cores.json"),
        ("kernels", None, "", "kernels-2-cores.json"),
        ("quality", "demo", "q4_1", "quality-demo-2-cores.json"),
    ],
)
def test_file_names_say_what_is_in_them(
    kind: str, model: str | None, format: str, name: str
) -> None:
    assert results.file_name(kind, model, format, 2) == name


def test_only_a_run_of_the_same_kind_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert results.read_earlier(path, {"kind": "peers"}) is None
    results.write(path, {"kind": "peers", "commit": "a", "workloads": {}})
    expected = {"kind": "peers", "commit": "a"}
    assert results.read_earlier(path, expected) == {**expected, "workloads": {}}
    with pytest.raises(ValueError, match="its commit is another"):
        results.read_earlier(path, {"kind": "peers", "commit": "b"})
