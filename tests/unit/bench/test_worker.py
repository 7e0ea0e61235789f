"""The pipe to a measuring process, whatever program is at its other end."""

import sys
from pathlib import Path

import pytest

from eyas.bench.worker import Worker

PEER = """\
import json, sys
spec = json.loads(sys.argv[1])
if spec.get("broken"):
    print(json.dumps({"error": "no such model"})), sys.exit(1)
print(json.dumps({"result": "loaded"}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task["task"] == "die":
        sys.exit(3)
    print(json.dumps({"result": [spec["x"], task["y"]]}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "peer.py").write_text(PEER)
    return [sys.executable, str(tmp_path / "peer.py")]


def test_another_program_can_be_the_worker(command: list[str]) -> None:
    with Worker(command, x=1) as worker:
        assert worker.do("anything", y=2) == [1, 2]
        assert worker.cpu_seconds() >= 0


def test_what_a_worker_says_when_it_fails_is_raised(command: list[str]) -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        Worker(command, broken=True)


def test_a_worker_that_ends_is_reported(command: list[str]) -> None:
    with Worker(command, x=1) as worker:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with status 3"):
                worker.do("die")


def test_our_own_worker_reports_a_users_error() -> None:
    with pytest.raises(RuntimeError, match="no model"):
        Worker(engine="eyas_model", model="/no/such.gguf", threads=1)
