"""LLM end to end on tiny models: vLLM's interface, and bad input that disturbs nobody else."""

import itertools
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import save_tiny_hf
from harness import tiny_checkpoint
from safetensors.torch import load_file, save_file

from eyas import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=1)


def tiny(path=None, **options):
    return LLM(
        path or str(tiny_checkpoint("llama", 0)),
        use_tqdm_on_load=False,
        kv_cache_memory=8 << 20,
        **options,
    )


@pytest.fixture(scope="module")
def llm():
    with tiny(max_model_len=64) as made:
        yield made


def test_prompt_forms_agree(llm) -> None:
    text = "the cat sat on the mat"
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.generate(
        [text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False
    )
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {
        tuple(outputs[0].outputs[0].token_ids)
    }
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs == outputs[1].outputs
    assert llm.generate(text, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs


def test_one_params_per_prompt_and_n_samples(llm) -> None:
    params = [
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    ]
    first, second = llm.generate(["abc", "abc"], params, use_tqdm=False)
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert [len(sample.token_ids) for sample in first.outputs] == [5, 5, 5]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) > 1
    assert {sample.seed for sample in first.outputs} == {7}
    assert len(second.outputs[0].token_ids) == 3
    again = llm.generate("abc", params[0], use_tqdm=False)[0]
    assert again.outputs == first.outputs


def test_a_request_without_a_seed_can_be_replayed(llm) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first, second = llm.generate(["abc", "abc"], free, use_tqdm=False)
    assert first.outputs[0].seed != second.outputs[0].seed
    seeded = SamplingParams(
        temperature=1.0, max_tokens=8, ignore_eos=True, seed=first.outputs[0].seed
    )
    replayed = llm.generate("abc", seeded, use_tqdm=False)[0]
    assert replayed.outputs[0].token_ids == first.outputs[0].token_ids


def test_chat_uses_the_template(llm) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [one.outputs for one in both] == [output.outputs] * 2


def test_stream_is_cumulative_and_closing_aborts(llm) -> None:
    whole = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0]
    parts = [output.outputs[0] for output in llm.stream("abc", GREEDY)]
    assert parts[-1] == whole
    for before, after in itertools.pairwise(parts):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    stream = llm.stream("abc", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_integrity()


def test_a_stream_and_generate_share_the_engine(llm) -> None:
    """``generate`` steps the engine while a stream is open; neither loses an output."""
    whole = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0]
    other = llm.generate("xyz", GREEDY, use_tqdm=False)[0].outputs[0]
    stream = llm.stream("abc", GREEDY)
    next(stream)
    assert llm.generate("xyz", GREEDY, use_tqdm=False)[0].outputs[0] == other
    assert [output.outputs[0] for output in stream][-1] == whole
    assert not llm.engine.has_unfinished_requests()


def test_empty_batch(llm) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([5, 260], "token id 260 at prompt position 1 .* 260 tokens"),
        ([-1], "token id -1"),
        ([1.5], "token id 1.5"),
        ([5] * 64, "64 tokens, but max_model_len=64"),
        ({"prompt_ids": [1]}, "unknown prompt key 'prompt_ids'"),
        (3.5, "the prompt is a float"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_stays(llm, prompt, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[5, 6], prompt], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_integrity()
    assert len(llm.generate([5, 6], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "prompts is a NoneType"),
        ((5,), "prompts is a int"),
        ((b"abc",), "prompts is a bytes"),
        (({5, 6},), "prompts is a set"),
        (("a", 5), "sampling_params is '5'"),
        (("a", [None]), "sampling_params is"),
        (("a", [GREEDY, GREEDY]), "2 sampling_params for 1 prompts"),
    ],
)
def test_wrong_arguments_are_refused(llm, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(*arguments, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is a str"),
        (None, "messages is a NoneType"),
        ([], "conversation is empty"),
        (["hi"], "message 0 is a str"),
        ([5], "message 0 is a int"),
        ([{"role": "user"}], "message 0 has content None"),
        ([{"role": 5, "content": "x"}], "message 0 has role 5"),
        ([{"role": "user", "content": ["x"]}], "message 0 has content"),
    ],
)
def test_bad_conversations_are_refused(llm, messages, message) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_ctrl_c_at_random_moments_leaves_the_engine_whole(llm) -> None:
    """Real SIGINTs, at moments that wander over a request; afterwards the same output as before."""
    llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
    started = time.perf_counter()
    expected = [output.outputs for output in llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)]
    seconds = time.perf_counter() - started
    num_interrupted = 0
    old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for i in range(80):
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds * (i + 1) / 160)
                if i % 2:
                    llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
                else:
                    list(llm.stream("abc", GREEDY))
            except KeyboardInterrupt:
                num_interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            llm.engine.check_integrity()
            assert not llm.engine.has_unfinished_requests()
            assert llm.engine.scheduler.kv.num_used_blocks() == (0,)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert num_interrupted > 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
    assert [output.outputs for output in again] == expected


def test_several_threads_share_the_engine(llm) -> None:
    expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs
    with ThreadPoolExecutor(6) as threads:
        results = list(
            threads.map(lambda _: llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs, range(12))
        )
    assert results == [expected] * 12
    llm.engine.check_integrity()


def test_numpy_integers_are_token_ids(llm) -> None:
    ids = [np.int64(5), np.int64(6)]
    outputs = llm.generate(ids, GREEDY, use_tqdm=False)
    assert outputs[0].outputs == llm.generate([5, 6], GREEDY, use_tqdm=False)[0].outputs


def test_an_open_stream_ends_with_shutdown() -> None:
    made = tiny()
    stream = made.stream("abc", GREEDY)
    next(stream)
    made.shutdown()
    with pytest.raises(ValueError, match="shut down"):
        list(stream)
    assert not made.engine.has_unfinished_requests()


def test_after_shutdown_requests_are_refused() -> None:
    made = tiny()
    made.shutdown()
    made.shutdown()
    with pytest.raises(ValueError, match="shut down"):
        made.generate("abc", GREEDY, use_tqdm=False)


def test_a_long_prompt_is_cut_only_when_asked(llm) -> None:
    ids = [5 + i % 50 for i in range(80)]
    cut = llm.generate([ids], GREEDY, use_tqdm=False, truncate_prompt_tokens=20)[0]
    assert cut.prompt_token_ids == ids[-20:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "'tensor_parallel_size' exists in vLLM but not in Eyas"),
        ({"max_modellen": 5}, "unknown argument 'max_modellen'"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"max_model_len": 1000}, "max_model_len is 1000, but .* 256 tokens"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "less than max_num_seqs"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_seqs": 2},
            "less than max_model_len",
        ),
        ({"kv_cache_memory": 1000}, "kv_cache_memory is 1000 bytes"),
        ({"block_size": True}, "block_size is True"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is None"),
        ({"speculative_config": {}}, "speculative_config is empty"),
        ({"speculative_config": "ngram"}, "speculative_config is a str"),
        ({"speculative_config": [1]}, "speculative_config is a list"),
        ({"tokenizer": "/nowhere/at/all"}, "no model '/nowhere/at/all'"),
        ({"tokenizer": 5}, "the model's name is 5"),
        ({"tokenizer": "~nosuchuser/x"}, "no model '~nosuchuser/x'"),
        ({"tokenizer": "a" * 5000}, "no model 'aaa.* too long"),
        ({"kv_cache_memory": 10**24}, "KV cache can't be allocated"),
    ],
)
def test_bad_configuration_is_refused(options, message) -> None:
    settings = {"kv_cache_memory": 8 << 20, **options}
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_checkpoint("llama", 0)), use_tqdm_on_load=False, **settings)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path) -> None:
    draft = save_tiny_hf(tmp_path, "llama", 1, vocab_size=200)
    with pytest.raises(ValueError, match="draft's vocabulary has 200 tokens and the target's 260"):
        tiny(speculative_config={"model": str(draft), "num_speculative_tokens": 2})


def test_a_request_whose_logits_break_fails_alone(tmp_path) -> None:
    """Token 40's value overflows the float16 cache: it breaks its own request, and no other."""
    path = save_tiny_hf(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.0  # an input that token 40 alone has
    weights["model.embed_tokens.weight"][40, 0] = 1.0
    weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = 1e6
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    good = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={40: -100.0}, logprobs=0, seed=1
    )
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    with tiny(str(path), speculative_config=speculative) as llm:
        alone = [llm.generate([one], params, use_tqdm=False)[0].outputs for one in good]
        bad, *others = llm.generate([[5, 40, 6], *good], params, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert "finite" in bad.outputs[0].error
        assert bad.outputs[0].token_ids == []
        assert [output.outputs for output in others] == alone
        # The broken request's blocks are free again, and harm nobody who gets them.
        again = llm.generate(good, params, use_tqdm=False)
        assert [output.outputs for output in again] == alone
        llm.engine.check_integrity()


def test_an_interrupted_generate_leaves_nothing_behind(llm, monkeypatch) -> None:
    calls = 0
    execute = llm.engine.executor.runner.execute

    def interrupted(plan):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return execute(plan)

    monkeypatch.setattr(llm.engine.executor.runner, "execute", interrupted)
    expected_before = calls
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], GREEDY, use_tqdm=False)
    assert calls == expected_before + 3
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_integrity()
    assert llm.engine.scheduler.kv.num_used_blocks() == (0,)
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_metrics_have_vllms_names(llm) -> None:
    names = {metric.name for metric in llm.get_metrics()}
    assert {"eyas:prompt_tokens", "eyas:generation_tokens", "eyas:spec_decode_num_drafts"} <= names


def test_a_script_on_standard_input_works() -> None:
    script = f"""
from eyas import LLM, SamplingParams
llm = LLM({str(tiny_checkpoint("llama", 0))!r}, kv_cache_memory=8 << 20)
output = llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))[0]
print(len(output.outputs[0].token_ids))
"""
    result = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "4"
