"""The engine over a fake executor: outputs are those of the model alone, whatever happens."""

import contextlib
import dataclasses
import itertools

import pytest
from checkpoints import tiny_tokenizer
from fake_executor import VOCAB, FakeExecutor, logprobs_at, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.engine import Engine, EngineOptions
from eyas.engine.output import Logprob
from eyas.engine.scheduler import SchedulerOptions
from eyas.sampling.params import SamplingParams
from eyas.tokenizer import IncrementalDecoder, Tokenizer

TOKENIZER = Tokenizer(
    tiny_tokenizer(), eos_token_ids=(1,), bos_token_id=0, chat_template=None, template_tokens={}
)
BLOCK = 4
PROMPT = [5, 6, 7, 8, 9]


def make(executor=None, *, tokenizer=TOKENIZER, max_drafts=3, blocks=100, **limits):
    executor = executor or FakeExecutor()
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | limits
    return Engine(
        executor,
        tokenizer,
        EngineOptions(
            vocab_size=VOCAB,
            eos_token_ids=(1,),
            limits=SchedulerOptions(**options),
            max_drafts=max_drafts,
            block_size=BLOCK,
            kv_cache_memory=blocks * BLOCK * 2 * 4,
        ),
        clock=itertools.count().__next__,
    )


def run(engine):
    """All outputs, by request, in the order they came."""
    seen = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return seen


def alone(prompt, count, seed=0, sample_index=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, sample_index))
    return tokens[len(prompt) :]


def decode(prompt, tokens):
    decoder = IncrementalDecoder(TOKENIZER, prompt)
    return "".join(map(decoder.push, tokens)) + decoder.finish()


def plain(output, **changes):
    """A sample's output without what may depend on speculation."""
    return dataclasses.replace(output, draft_positions=[], **changes)


def test_one_request_from_prompt_to_end():
    engine = make()
    params = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    outputs = run(engine)["a"]
    final = outputs[-1]
    expected = alone(PROMPT, 9, seed=3)
    (sample,) = final.outputs
    assert sample.token_ids == expected
    assert sample.text == decode(PROMPT, expected)
    assert (sample.finish_reason, sample.stop_reason, sample.error) == ("length", None, None)
    assert (sample.index, sample.seed) == (0, 3)
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
    assert (final.prompt, final.prompt_token_ids, final.prompt_logprobs) == (None, PROMPT, None)
    # Cumulative: each extends the one before, and only the last is finished.
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(output.outputs[0] for output in outputs):
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert len(later.token_ids) > len(earlier.token_ids)
        assert later.text.startswith(earlier.text)


def test_draft_positions_say_which_tokens_were_drafted():
    executor = FakeExecutor(accuracy=1.0)
    engine = make(executor, max_drafts=2)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    (sample,) = run(engine)["a"][-1].outputs
    # The prompt's own token, then two accepted and a bonus token per step; cut by max_tokens.
    assert sample.draft_positions == [None, 0, 1, None, 0, 1]
    executor = FakeExecutor(accuracy=0.0)
    engine = make(executor)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    assert run(engine)["a"][-1].outputs[0].draft_positions == [None] * 6


def test_logprobs():
    engine = make(max_num_batched_tokens=4)
    params = SamplingParams(max_tokens=4, seed=0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.add_request("a", PROMPT, params)
    output = run(engine)["a"][-1]
    sample = output.outputs[0]
    tokens = [*PROMPT, *sample.token_ids]

    def entry(position, top):
        e = logprobs_at(tokens[:position], tokens[position], top)
        rows = zip(e.token_ids, e.logprobs, e.ranks, strict=True)
        return [(i, Logprob(value, rank, TOKENIZER.token_text(i))) for i, value, rank in rows]

    assert [list(d.items()) for d in sample.logprobs] == [entry(5 + i, 2) for i in range(4)]
    assert output.prompt_logprobs[0] is None
    assert [list(d.items()) for d in output.prompt_logprobs[1:]] == [
        entry(i, 1) for i in range(1, 5)
    ]
    assert sample.cumulative_logprob == pytest.approx(
        sum(sample.logprobs[i][token].logprob for i, token in enumerate(sample.token_ids))
    )


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(2, 255), min_size=1, max_size=20),
            "seed": st.integers(0, 5),
            "max_tokens": st.integers(1, 20),
            "min_tokens": st.integers(0, 1),
            "stop": st.lists(st.text("etaoin", min_size=1, max_size=1), max_size=2, unique=True),
            "stop_token_ids": st.lists(st.integers(0, 259), max_size=40),
            "logprobs": st.sampled_from([None, 0, 2]),
            "prompt_logprobs": st.sampled_from([None, 1]),
            "num_speculative_tokens": st.sampled_from([None, 0, 1, 5]),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    accuracy=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    budget=st.integers(4, 24),
    blocks=st.integers(16, 40),
    raise_at=st.sets(st.integers(1, 30), max_size=4),
    n=st.sampled_from([1, 3]),
)
def test_speculation_batching_and_failures_change_no_output(
    requests, accuracy, budget, blocks, raise_at, n
):
    """The reference takes each request alone and one token per step: so this is also the test
    that any grouping of the same tokens gives the same text, reasons and log-probabilities."""
    many = make(FakeExecutor(accuracy), blocks=blocks, max_num_batched_tokens=budget)
    many.executor.raise_at = {step: KeyboardInterrupt() for step in raise_at}
    expected = {}
    for i, request in enumerate(requests):
        options = {k: v for k, v in request.items() if k != "prompt"} | {"n": n}
        options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        engine = make(max_drafts=0)
        params = SamplingParams(**options | {"num_speculative_tokens": None})
        engine.add_request(str(i), request["prompt"], params)
        expected[str(i)] = run(engine)[str(i)][-1]
        many.add_request(str(i), request["prompt"], SamplingParams(**options))
    finals = {}
    while many.has_unfinished_requests():
        try:
            outputs = many.step()
        except KeyboardInterrupt:
            outputs = []
        many.check_integrity()
        finals |= {output.request_id: output for output in outputs if output.finished}
    assert finals.keys() == expected.keys()
    for request_id, final in finals.items():
        reference = expected[request_id]
        assert list(map(plain, final.outputs)) == list(map(plain, reference.outputs))
        assert final.prompt_logprobs == reference.prompt_logprobs
        for sample in final.outputs:
            assert len(sample.draft_positions) == len(sample.token_ids)


def test_n_samples_are_one_output():
    engine = make()
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    engine.add_request("a", PROMPT, params)
    outputs = run(engine)["a"]
    assert all(len(output.outputs) == 3 for output in outputs)
    assert sum(output.finished for output in outputs) == 1
    for index, sample in enumerate(outputs[-1].outputs):
        assert (sample.index, sample.seed) == (index, 7)
        assert sample.token_ids == alone(PROMPT, 8, seed=7, sample_index=index)
    assert len(outputs[-1].prompt_logprobs) == len(PROMPT)
    # One sample computes them for all: the others may read the prefix cache.
    rules = [new.rules for plan in engine.executor.plans for new in plan.new]
    assert [r.prompt_logprobs for r in rules] == [0, None, None]


def test_final_only_builds_no_other_output():
    engine = make()
    engine.add_request("a", PROMPT, SamplingParams(n=2, max_tokens=8), output_kind="final_only")
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=8))
    seen = run(engine)
    assert [output.finished for output in seen["a"]] == [True]
    assert len(seen["b"]) > 1


def test_requests_without_a_seed():
    def seeds(engine_seed, order):
        engine = make()
        engine.options = dataclasses.replace(engine.options, seed=engine_seed)
        for request_id in order:
            engine.add_request(request_id, PROMPT, SamplingParams(n=2, max_tokens=2))
        finals = {name: outputs[-1] for name, outputs in run(engine).items()}
        for final in finals.values():
            assert final.outputs[0].seed == final.outputs[1].seed
        return [finals[name].outputs[0].seed for name in order]

    first = seeds(0, "abc")
    assert first == seeds(0, "cab")  # by number of arrival
    assert len({*first, *seeds(1, "abc")}) == 6
    assert all(0 <= seed < 2**63 for seed in first)


def test_a_refused_request_does_not_shift_the_seeds_of_others():
    one, two = make(), make()
    with pytest.raises(ValueError, match="empty"):
        two.add_request("bad", [], SamplingParams())
    for engine in (one, two):
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=2))
    assert run(one)["a"][-1].outputs == run(two)["a"][-1].outputs


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort(steps):
    engine = make(max_num_seqs=2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for request_id in "abc":  # c waits
        engine.add_request(request_id, PROMPT, dataclasses.replace(params, n=2))
    seen = {}
    for _ in range(steps):
        seen |= {output.request_id: output for output in engine.step()}
    for request_id in "ac":
        output = engine.abort_request(request_id)
        assert output.finished
        assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 2
        if request_id in seen:
            tokens = [sample.token_ids for sample in seen[request_id].outputs]
            assert [sample.token_ids for sample in output.outputs] == tokens
        for sample in output.outputs:
            assert sample.text == decode(PROMPT, sample.token_ids)
        assert engine.abort_request(request_id) is None
    engine.check_integrity()
    seen = run(engine)
    assert seen.keys() == {"b"}
    final = seen["b"][-1].outputs
    assert [sample.finish_reason for sample in final] == ["length"] * 2
    assert engine.abort_request("b") is None
    engine.add_request("a", PROMPT, params)  # the id is free again
    assert run(engine)["a"][-1].finished


def test_an_aborted_text_shows_what_was_held_back():
    text = "say stop"
    ids = iter([*TOKENIZER.encode(text), 5])
    engine = make(FakeExecutor(model=lambda *_: next(ids)), max_drafts=0)
    engine.add_request("a", PROMPT, SamplingParams(stop=" stop!", max_tokens=30))
    for _ in TOKENIZER.encode(text):
        (output,) = engine.step()
    assert output.outputs[0].text == "say"
    assert engine.abort_request("a").outputs[0].text == "say stop"


def test_a_request_that_fails_disturbs_no_other():
    executor = FakeExecutor()
    engine = make(executor)
    params = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    engine.add_request("b", PROMPT, params)
    engine.step()
    engine.step()
    executor.fail_ids = {"a#1": "logits are not finite"}
    final = {name: outputs[-1] for name, outputs in run(engine).items()}
    failed = final["a"].outputs[1]
    assert (failed.finish_reason, failed.error) == ("error", "logits are not finite")
    assert failed.text == decode(PROMPT, failed.token_ids)
    assert 0 < len(failed.token_ids) < 12
    for sample in (final["a"].outputs[0], *final["b"].outputs):
        assert sample.token_ids == alone(PROMPT, 12, 1, sample.index)
        assert sample.error is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_a_failed_step_aborts_and_steps_work(error):
    executor = FakeExecutor()
    engine = make(executor)
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    engine.add_request("b", PROMPT, params)
    executor.raise_at = {3: error()}
    engine.step()
    engine.step()
    with pytest.raises(error):
        engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    engine.check_integrity()
    final = run(engine)["b"][-1]
    assert final.outputs[0].token_ids == alone(PROMPT, 12, 1)
    assert final.metrics.num_preemptions == 1


def test_a_step_that_fails_while_stop_rules_are_asked(monkeypatch):
    """Tokens that were decided on, but not committed, are forgotten, the finish included."""
    executor = FakeExecutor(accuracy=1.0)
    engine = make(executor)
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, logprobs=1)
    for request_id in "ab":
        engine.add_request(request_id, PROMPT, params)
    engine.step()
    engine.step()
    collector, sample = engine._samples["b#0"]

    def fail(token_id):
        raise RuntimeError("decoder")

    monkeypatch.setattr(sample._text, "push", fail)  # a has finished by then
    with pytest.raises(RuntimeError, match="decoder"):
        engine.step()
    assert collector.num_unfinished == 1
    monkeypatch.undo()
    seen = run(engine)
    for request_id in "ab":
        final = seen[request_id][-1].outputs[0]
        assert final.token_ids == alone(PROMPT, 6, 1)
        assert final.text == decode(PROMPT, final.token_ids)
        assert len(final.logprobs) == len(final.draft_positions) == 6


def test_prompt_logprobs_of_a_prompt_that_is_computed_again():
    executor = FakeExecutor()
    engine = make(executor, max_num_batched_tokens=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    engine.add_request("a", [*range(10, 20)], params)
    executor.raise_at = {2: RuntimeError(), 6: RuntimeError()}  # within the prompt, and after it
    outputs = []
    while engine.has_unfinished_requests():
        with contextlib.suppress(RuntimeError):
            outputs = engine.step()
    (output,) = outputs
    assert output.metrics.num_preemptions == 2
    assert output.prompt_logprobs[0] is None
    expected = [logprobs_at([*range(10, 10 + i)], 10 + i, 1).token_ids for i in range(1, 10)]
    assert [tuple(entry) for entry in output.prompt_logprobs[1:]] == expected


def test_request_metrics_and_cached_tokens():
    engine = make(FakeExecutor(accuracy=1.0), max_drafts=3)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = list(range(10, 22))
    engine.add_request("a", prompt, params)
    metrics = run(engine)["a"][-1].metrics
    assert metrics.arrival_time < metrics.first_token_time < metrics.finished_time
    # 1 from the prompt, then two verified drafts of 3: 4 tokens, and 1 of another 4 is kept.
    counts = (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens)
    assert counts == (2, 6, 6)
    engine.add_request("b", prompt, params)
    assert run(engine)["b"][-1].num_cached_tokens == 8  # whole blocks, one token left to compute
    engine.reset_prefix_cache()
    engine.add_request("c", prompt, params)
    assert run(engine)["c"][-1].num_cached_tokens == 0


def test_engine_metrics():
    engine = make(FakeExecutor(accuracy=1.0), max_drafts=3)
    prompt = list(range(10, 22))
    for name in "ab":
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        engine.add_request(name, prompt, params)
        engine.step()
        by_name = {metric.name: metric for metric in engine.get_metrics()}
        assert by_name["eyas:num_requests_running"].value == 1
        assert (
            by_name["eyas:kv_cache_usage_perc"].value
            == len(engine.executor.plans[-1].work[0].tables[0].blocks) / 100
        )
        run(engine)
    engine.add_request("c", prompt, SamplingParams(max_tokens=6))
    engine.abort_request("c")
    values = {
        (metric.name, *metric.labels.values()): getattr(metric, "value", None)
        for metric in engine.get_metrics()
    }
    expected = {
        ("eyas:num_requests_finished", "length"): 2,
        ("eyas:num_requests_finished", "abort"): 1,
        ("eyas:num_requests_finished", "stop"): 0,
        ("eyas:num_requests_finished", "error"): 0,
        ("eyas:num_steps",): 6,
        ("eyas:prompt_tokens",): 24,
        ("eyas:generation_tokens",): 12,
        ("eyas:prefix_cache_queries",): 24,
        ("eyas:prefix_cache_hits",): 8,
        ("eyas:num_preemptions",): 0,
        ("eyas:num_decode_steps",): 4,
        ("eyas:num_decode_tokens",): 16,
        ("eyas:spec_decode_num_drafts",): 4,
        ("eyas:spec_decode_num_draft_tokens",): 12,
        ("eyas:spec_decode_num_accepted_tokens",): 12,
        ("eyas:num_requests_running",): 0,
        ("eyas:num_requests_waiting",): 0,
        ("eyas:kv_cache_usage_perc",): 0,
        ("eyas:kv_blocks_total", "0", "target"): 100,
        ("eyas:kv_blocks_held", "0", "target"): 0,
        ("eyas:kv_blocks_cached", "0", "target"): 5,
    }
    assert {key: value for key, value in values.items() if value is not None} == expected
    vectors = {m.name: m.values for m in engine.get_metrics() if hasattr(m, "values")}
    assert vectors == {
        "eyas:spec_decode_num_draft_tokens_per_pos": [4, 4, 4],
        "eyas:spec_decode_num_accepted_tokens_per_pos": [4, 4, 4],
    }
    assert all(metric.help for metric in engine.get_metrics())


def test_what_add_request_refuses_changes_nothing():
    engine = make(blocks=16)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3))
    for request_id, prompt, params, message in (
        ("a", PROMPT, SamplingParams(), "request 'a' is already running"),
        (7, PROMPT, SamplingParams(), "request_id is 7: it must be a string"),
        ("b", [5] * 64, SamplingParams(), "64 tokens, but max_model_len=64 leaves room for 63"),
        ("b", [260], SamplingParams(), "token id 260 at prompt position 0 is outside"),
        ("b", PROMPT, SamplingParams(stop_token_ids=[999]), "stop_token_ids: token id 999"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request(request_id, prompt, params)
        engine.check_integrity()
    assert run(engine).keys() == {"a"}


def test_own_number_of_drafts():
    for own, most in ((None, 3), (0, 0), (2, 2), (5, 5)):
        executor = FakeExecutor(accuracy=1.0)
        engine = make(executor)
        params = SamplingParams(max_tokens=20, ignore_eos=True, num_speculative_tokens=own)
        engine.add_request("a", PROMPT, params)
        run(engine)
        assert max(len(work.drafts) for plan in executor.plans for work in plan.work) == most
    engine = make(max_drafts=None)
    engine.add_request("a", PROMPT, SamplingParams(num_speculative_tokens=0))
    with pytest.raises(ValueError, match="num_speculative_tokens is 2, but this engine has no dra"):
        engine.add_request("b", PROMPT, SamplingParams(num_speculative_tokens=2))


def test_without_a_tokenizer():
    engine = make(tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: give prompt_token_ids"):
        engine.add_request("a", "text", SamplingParams(detokenize=False))
    with pytest.raises(ValueError, match="no tokenizer: set detokenize=False"):
        engine.add_request("a", PROMPT, SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        engine.add_request("a", PROMPT, SamplingParams(detokenize=False, bad_words=["x"]))
    params = SamplingParams(detokenize=False, logprobs=1, seed=2, max_tokens=5, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    sample = run(engine)["a"][-1].outputs[0]
    assert (sample.text, sample.token_ids) == ("", alone(PROMPT, 5, 2))
    assert sample.logprobs[0][sample.token_ids[0]].decoded_token is None


def test_truncation_of_a_prompt():
    engine = make()
    engine.add_request("a", [*range(4, 204)], SamplingParams(), truncate_prompt_tokens=-1)
    engine.add_request("b", [*range(4, 204)], SamplingParams(), truncate_prompt_tokens=5)
    seen = run(engine)
    assert seen["a"][-1].prompt_token_ids == [*range(141, 204)]
    assert (seen["a"][-1].outputs[0].finish_reason) in ("length", "stop")
    assert len(seen["a"][-1].outputs[0].token_ids) == 1
    assert seen["b"][-1].prompt_token_ids == [*range(199, 204)]


def test_nothing_to_do():
    engine = make()
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert engine.abort_request("a") is None
    engine.shutdown()
    assert engine.executor.is_shut_down
    assert engine.executor.allocated == ((100,), BLOCK)
