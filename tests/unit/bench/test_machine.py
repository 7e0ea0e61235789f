"""Facts that a benchmark's JSON carries."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from eyas import _core
from eyas.bench.machine import facts, last_level_cache, peak_memory


def test_facts_name_machine_and_versions() -> None:
    known = facts(threads=2)
    assert known["threads"] == 2
    assert known["machine"]["cpu"]
    assert known["machine"]["cores"] >= 1
    assert known["versions"]["torch"] == torch.__version__
    assert known["versions"]["eyas"] != "not installed"


def test_peak_memory_is_this_processs_own() -> None:
    """A child that allocates nothing must not report what its parent holds."""
    held = np.ones(200 * 2**20, dtype=np.uint8)
    script = "from eyas.bench.machine import peak_memory; print(peak_memory())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert peak_memory() > held.nbytes
    assert int(done.stdout) < 100 * 2**20


@pytest.mark.parametrize("isa", _core.instruction_sets())
def test_peaks_are_measured_by_all_threads(isa: str) -> None:
    for threads in (1, 3):
        context = _core.Context(isa, threads)
        rates = _core.measure_peaks(context, 1 << 20, 1)
        assert all(1e7 < rate < 1e14 for rate in rates)


def test_the_last_level_cache_has_a_size() -> None:
    assert 2**18 <= last_level_cache() <= 2**34
