"""Every command, end to end, on a tiny random model in this process."""

import io
import subprocess
import sys
from typing import Any

import pytest
from checkpoints import save_tiny_hf

from eyas.cli import verify
from eyas.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_hf(tmp_path_factory.mktemp("model"), max_position_embeddings=4096))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "prompts.txt"
    file.write_text("one and two and one and two and\nhello hello hello\nabc abc abc abc\n")
    return str(file)


Captured = pytest.CaptureFixture[str]


def test_generate_prints_the_text_and_stream_prints_the_same(model: str, capsys: Captured) -> None:
    line = ["generate", "abc abc abc", "--model", model, "--max_tokens", "24", "--temp", "0.7"]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert main([*line, "--stream"]) == 0
    assert capsys.readouterr().out == text
    assert main([*line, "--method", "None"]) == 0
    assert capsys.readouterr().out == text


def test_generate_sets_several_texts_apart(model: str, capsys: Captured) -> None:
    line = ["generate", "a", "b", "--model", model, "--max_tokens", "4", "--temp", "1", "-n", "2"]
    assert main(line) == 0
    out = capsys.readouterr().out
    for prompt in (1, 2):
        for sample in (1, 2):
            assert f"--- prompt {prompt}, sample {sample}\n" in out


def test_chat_takes_messages_from_a_pipe(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "hello\n/nonsense\n/reset\nhello\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", "--model", model, "--max_tokens", "12", "--show_drafts"]) == 0
    captured = capsys.readouterr()
    first, second = captured.out[: len(captured.out) // 2], captured.out[len(captured.out) // 2 :]
    assert first == second  # after /reset the same question has the same answer
    assert "/nonsense" in captured.err
    assert "\033" not in captured.out


def test_spec_decode_reports_between_rules(model: str, prompts: str, capsys: Captured) -> None:
    line = ["spec-decode", "--model_dir", model, "--dataset_path", prompts, "--output_len", "16"]
    assert main([*line, "--print_output", "--num_spec_tokens", "3"]) == 0
    captured = capsys.readouterr()
    for name in (
        "total_num_output_tokens: 48",
        "num_drafts:",
        "num_draft_tokens:",
        "num_accepted_tokens:",
        "mean acceptance length:",
        "acceptance at token 2:",
        "prompt: hello hello hello",
    ):
        assert name in captured.out
    assert captured.out.count("-" * 40) >= 2
    for bar in ("Adding requests", "Processed prompts", "output:"):
        assert bar in captured.err


def test_a_draft_that_is_the_target_is_always_accepted(
    model: str, prompts: str, capsys: Captured
) -> None:
    line = ["spec-decode", "--model_dir", model, "--dataset_path", prompts, "--output_len", "16"]
    draft = ["--method", "draft_model", "--draft_model", model, "--num_spec_tokens", "2"]
    assert main([*line, *draft]) == 0
    out = capsys.readouterr().out
    assert "acceptance at token 0: 1.00" in out
    assert "mean acceptance length: 3.00" in out


def test_verify_finds_no_difference(model: str, prompts: str, capsys: Captured) -> None:
    line = ["verify", "--model", model, "--dataset_path", prompts, "--output_len", "16"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "no difference" in out
    # 3 prompts, greedy and sampled, 16 tokens, 4 mixes beside the reference
    assert "compared 384 tokens" in out


def test_verify_reports_a_difference(
    model: str, prompts: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_mix = verify._run_mix

    def broken(mix: verify.Mix, *rest: Any) -> Any:
        outputs = run_mix(mix, *rest)
        if mix.name == "speculative, together":
            outputs[1].outputs[0].token_ids[3] += 1
        return outputs

    monkeypatch.setattr(verify, "_run_mix", broken)
    line = ["verify", "--model", model, "--dataset_path", prompts, "--output_len", "8"]
    assert main(line) == 1
    assert "first difference: speculative, together, request 2, token 3:" in capsys.readouterr().out


def test_demo_runs_on_any_model(model: str, capsys: Captured) -> None:
    assert main(["demo", "--model", model, "--output_len", "8"]) == 0
    out = capsys.readouterr().out
    assert "outputs identical: yes (48 tokens, 48 log-probabilities compared bit for bit)" in out
    assert "times as fast" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x" * 5000], "4096"),
        (["generate", ""], "empty"),
        (["generate", "x", "--temp", "-1"], "temperature"),
        (["generate", "x", "-n", "2"], "n must be 1"),
        (["generate", "x", "--kv_cache_memory", "1000"], "kv_cache_memory"),
    ],
)
def test_the_engines_refusals_are_one_line(
    model: str, argv: list[str], message: str, capsys: Captured
) -> None:
    assert main([*argv, "--model", model]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("eyas: error: ")
    assert message in error


def test_an_unknown_model_is_one_line(capsys: Captured) -> None:
    assert main(["generate", "x", "--model", "/no/such/model"]) == 2
    assert "no model '/no/such/model'" in capsys.readouterr().err


def test_chat_goes_on_when_the_context_is_full(
    model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there\n" * 4 + "/reset\nhi\n"))
    line = ["chat", "--model", model, "--max-tokens", "2", "--max-model-len", "120"]
    assert main(line) == 0
    captured = capsys.readouterr()
    assert "not sent: the prompt has" in captured.err
    assert captured.err.index("not sent") < captured.err.index("forgotten")
    assert captured.out.strip()


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- <&- 2>&-"])
def test_closed_standard_streams_are_no_crash(model: str, closed: str) -> None:
    command = f"{sys.executable} -m eyas generate a --model {model} --max-tokens 2 {closed}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
