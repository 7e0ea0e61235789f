"""What the README and the examples show is executed; what it links to exists."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "offline_inference"


def test_readme_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "The capital of France is ->" in capsys.readouterr().out


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) >= 5
    for link in links:
        assert (ROOT / link).is_file(), link


@pytest.mark.parametrize("name", ["basic.py", "chat.py"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_spec_decode_example_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "spec_decode.py --num_prompts 2 --output_len 24 --num_spec_tokens 3"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(EXAMPLES / "spec_decode.py"), run_name="__main__")
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for name in ("total_num_output_tokens", "mean acceptance length", "acceptance at token 0"):
        assert name in out
