"""The promise, by Hypothesis: whatever the draft, the batch, the chunking, the cache hits and the
preemptions, a request's token ids and log-probabilities are those of plain decoding, alone."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters import ScriptedDrafter, always_right, always_wrong, random_mix
from harness import MakeDrafter, make_engine, run, tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.drafters import suffix
from eyas.drafters.draft_model import ModelDrafter
from eyas.drafters.ngram import NgramDrafter, Options
from eyas.engine.output import CompletionOutput
from eyas.sampling.params import SamplingParams

MAX_LEN = 72
LLAMA4 = (
    ("intermediate_size", 24),
    ("intermediate_size_mlp", 40),
    ("num_local_experts", 4),
    ("num_hidden_layers", 3),
    ("no_rope_layer_interval", 2),
    ("floor_scale", 8),
    ("attn_scale", 0.3),
)
MODELS: tuple[tuple[str, int, tuple[tuple[str, Any], ...]], ...] = (
    ("llama", 0, ()),
    ("llama", 1, (("num_attention_heads", 3), ("num_key_value_heads", 1), ("head_dim", 16))),
    ("mistral", 2, (("sliding_window", 7),)),
    ("qwen2", 3, (("tie_word_embeddings", True),)),
    (
        "qwen3",
        4,
        (
            ("use_sliding_window", True),
            ("sliding_window", 11),
            ("max_window_layers", 1),
            ("num_hidden_layers", 3),
        ),
    ),
    ("llama4_text", 5, (*LLAMA4, ("attention_chunk_size", 16), ("num_experts_per_tok", 2))),
    ("llama4_text", 6, (*LLAMA4, ("attention_chunk_size", None), ("interleave_moe_layer_step", 2))),
)
DRAFTERS = ("ngram", "suffix", "model", "itself", "right", "wrong", "random")

tokens = st.integers(4, 30)  # few distinct ones, so that n-grams repeat
prompts = st.lists(tokens, min_size=1, max_size=34)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    temperature = draw(st.sampled_from([0.0, 0.0, 0.7, 1.3]))
    penalties = draw(st.booleans())
    return SamplingParams(
        temperature=temperature,
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 20])),
        min_p=draw(st.sampled_from([0.0, 0.02])),
        repetition_penalty=1.3 if penalties else 1.0,
        frequency_penalty=0.4 if penalties else 0.0,
        presence_penalty=-0.3 if penalties else 0.0,
        logit_bias=draw(st.sampled_from([None, {5: 2.0, 9: -3.0}])),
        allowed_token_ids=draw(st.sampled_from([None, None, list(range(1, 60))])),
        seed=draw(st.integers(0, 2**40)),
        max_tokens=draw(st.integers(1, 30)),
        min_tokens=draw(st.sampled_from([0, 1])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([[], [7, 8]])),
        logprobs=draw(st.sampled_from([0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        num_speculative_tokens=draw(st.sampled_from([None, None, None, 0, 2])),
        detokenize=False,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams, int]]:
    """Requests with their arrival steps; some prompts begin as others do."""
    first = draw(prompts)
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(prompts)
        if draw(st.booleans()):
            prompt = (first[: draw(st.integers(1, 34))] + prompt)[:40]
        batch.append((prompt, draw(sampling()), draw(st.integers(0, 5))))
    # At least one must be there for the first step.
    batch[0] = (*batch[0][:2], 0)
    return batch


def bits(sample: CompletionOutput, prompt_logprobs: Any) -> list[tuple[int, bytes]]:
    """Token ids and the bits of every reported log-probability."""
    assert sample.logprobs is not None
    entries = [*sample.logprobs, *[entry for entry in prompt_logprobs or [] if entry]]
    return [
        (token, struct.pack("<d", value.logprob) + struct.pack("<q", value.rank))
        for entry in entries
        for token, value in entry.items()
    ]


def plain(
    model: tuple[Any, Any],
    prompt: Sequence[int],
    params: SamplingParams,
    kv_dtype: torch.dtype = torch.float32,
) -> Any:
    engine = make_engine(
        *model,
        max_model_len=MAX_LEN,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_LEN,
        block_size=16,
        enable_prefix_caching=False,
        poison=False,
        kv_dtype=kv_dtype,
    )
    return run(engine, [prompt], [replace(params, num_speculative_tokens=None)])[0]


def drafter_factory(
    kind: str, seed: int, scripts: dict[tuple[int, ...], list[int]], vocab_size: int, spec: Any
) -> MakeDrafter:
    if kind == "ngram":
        return lambda target, ops: NgramDrafter(Options(3, 1))
    if kind == "suffix":
        options = suffix.Options(suffix_decoding_max_cached_requests=seed % 3)
        return lambda target, ops: suffix.SuffixDrafter(options)
    if kind in ("model", "itself"):
        model_type, model_seed, overrides = spec
        if kind == "model" and model_type == "llama4_text":  # in chunks if the target isn't
            chunk = None if dict(overrides)["attention_chunk_size"] else 16
            model_seed, overrides = model_seed + 10, (*LLAMA4, ("attention_chunk_size", chunk))
        elif kind == "model":
            model_type, model_seed, overrides = "llama", model_seed + 10, ()
        draft, _ = tiny_target(model_type, model_seed, overrides, "draft")
        return lambda target, ops: ModelDrafter(draft, ops, "exact")
    choose = {
        "right": always_right,
        "wrong": always_wrong(vocab_size),
        "random": random_mix(vocab_size, seed),
    }[kind]
    return lambda target, ops: ScriptedDrafter(scripts, choose)


def check(spec: Any, batch: Any, kind: str, data: st.DataObject) -> None:
    model = tiny_target(*spec)
    num_threads = data.draw(st.sampled_from([None, None, 1, 3]), "threads")
    threaded = tiny_target(*spec, num_threads=num_threads)
    kv_dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]), "KV")
    expected = [plain(model, prompt, params, kv_dtype) for prompt, params, _ in batch]
    scripts: dict[tuple[int, ...], list[int]] = {}
    for (prompt, _, _), output in zip(batch, expected, strict=True):
        key = tuple(prompt)
        continued = [*prompt, *output.outputs[0].token_ids]
        if len(continued) > len(scripts.get(key, ())):
            scripts[key] = continued
    max_drafts = data.draw(st.integers(1, 8), "K")
    num_seqs = data.draw(st.integers(1, 4), "max_num_seqs")
    make_drafter = drafter_factory(kind, 5, scripts, model[0].vocab_size, spec)
    tight = data.draw(st.booleans(), "tight")
    groups = [*model[0].groups, *make_drafter(*threaded).needs.kv_groups]
    fits = [1, 8, 16] if any(group.kv.chunk for group in groups) else [1, 3, 8, 16, 200]
    block_size = data.draw(st.sampled_from(fits), "block_size")
    num_groups = len(groups)
    one = -(-(MAX_LEN + max_drafts) // block_size)
    engine = make_engine(
        *threaded,
        make_drafter,
        max_drafts=max_drafts,
        max_model_len=MAX_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=data.draw(st.integers(num_seqs, 40), "budget"),
        block_size=block_size,
        num_blocks=(one + 1,) * num_groups if tight else None,
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        kv_dtype=kv_dtype,
    )
    actual = run(
        engine,
        [prompt for prompt, _, _ in batch],
        [params for _, params, _ in batch],
        [arrival for _, _, arrival in batch],
    )
    assert_same(expected, actual)


def assert_same(expected: Sequence[Any], actual: Sequence[Any]) -> None:
    for left, right in zip(expected, actual, strict=True):
        a, b = left.outputs[0], right.outputs[0]
        assert b.error is None
        assert a.token_ids == b.token_ids
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert bits(a, left.prompt_logprobs) == bits(b, right.prompt_logprobs)


QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("kind", DRAFTERS)
@QUICK
@given(spec=st.sampled_from(MODELS), batch=batches(), data=st.data())
def test_output_is_that_of_plain_decoding_alone(kind, spec, batch, data) -> None:
    check(spec, batch, kind, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@settings(QUICK, max_examples=150, derandomize=False)
@given(spec=st.sampled_from(MODELS), batch=batches(), data=st.data())
def test_output_is_that_of_plain_decoding_alone_longer(kind, spec, batch, data) -> None:
    check(spec, batch, kind, data)


@pytest.mark.parametrize("kind", ["model", "random"])
@pytest.mark.parametrize("spec", [MODELS[0], *MODELS[4:]])
def test_under_preemption_and_cache_hits(kind, spec) -> None:
    """A case of which it is known that it preempts, hits the cache, and rejects drafts."""
    model = tiny_target(*spec)
    shared = [5 + i % 11 for i in range(24)]
    requests = [[*shared, 30 + i] for i in range(4)] + [[7, 8, 9, 10]]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2),
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
        )
        for i in range(len(requests))
    ]
    expected = [plain(model, *one) for one in zip(requests, params, strict=True)]
    scripts = {
        tuple(prompt): [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(requests, expected, strict=True)
    }
    make_drafter = drafter_factory(kind, 5, scripts, model[0].vocab_size, spec)
    num_groups = len(model[0].groups) + len(make_drafter(*model).needs.kv_groups)
    engine = make_engine(
        *model,
        make_drafter,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        block_size=8,
        num_blocks=(15,) * num_groups,
    )
    actual = run(engine, requests, params, arrivals=[0, 4, 8, 12, 16])
    assert_same(expected, actual)
    stats = engine.spec_stats()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.num_hit_tokens > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens or kind == "model"
