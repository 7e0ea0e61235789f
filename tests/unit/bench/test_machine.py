"""Facts that a benchmark's JSON carries."""

import subprocess
import sys

import numpy as np
import torch

from eyas.bench.machine import facts, peak_memory


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
