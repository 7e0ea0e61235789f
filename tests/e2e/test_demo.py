"""The demo model, real weights: speculation and batching change no bit; transformers agrees."""

import struct
from pathlib import Path

import pytest
import torch

from eyas import LLM, SamplingParams
from eyas.cli.datasets import load_prompts, prompt_token_ids

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


def requests(llm, count):
    ids = prompt_token_ids(llm.get_tokenizer(), load_prompts(None, count), True)
    return [{"prompt_token_ids": one} for one in ids]


def params_for(count, max_tokens, temperature):
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, logprobs=2)
        for i in range(count)
    ]


def bits(output):
    return [
        [(token, struct.pack("<d", entry.logprob)) for token, entry in position.items()]
        for position in output.outputs[0].logprobs
    ]


def compare_plain_and_speculative(count, max_tokens):
    """Plain and alone against speculative and together; returns the numbers compared."""
    plain, speculative = [], []
    with LLM("demo", max_num_seqs=1, use_tqdm_on_load=False, enable_prefix_caching=False) as llm:
        for temperature in (0.0, 0.8):
            for prompt, params in zip(
                requests(llm, count), params_for(count, max_tokens, temperature), strict=True
            ):
                plain += llm.generate([prompt], params, use_tqdm=False)
    with LLM(
        "demo",
        max_num_seqs=5,
        max_num_batched_tokens=96,
        use_tqdm_on_load=False,
        speculative_config=NGRAM,
    ) as llm:
        for temperature in (0.0, 0.8):
            speculative += llm.generate(
                requests(llm, count), params_for(count, max_tokens, temperature), use_tqdm=False
            )
        assert llm.spec_stats().num_accepted_tokens > 0
        llm.engine.check_integrity()
    for ours, theirs in zip(speculative, plain, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].text == theirs.outputs[0].text
        assert bits(ours) == bits(theirs)


def test_speculation_changes_no_bit() -> None:
    compare_plain_and_speculative(count=4, max_tokens=24)


@pytest.mark.slow
def test_speculation_changes_no_bit_on_many_prompts() -> None:
    compare_plain_and_speculative(count=20, max_tokens=128)


def test_greedy_text_is_that_of_transformers() -> None:
    """20 prompts, on the same dequantised weights, wherever the best two tokens are apart.

    One pass of transformers over prompt and output gives its choice at every position, given our
    prefix; the tolerance is 20 times the float32 error of a sum of 576 terms at the logits' size.
    """
    import transformers

    from eyas.loading.checkpoint import open_checkpoint

    count, max_tokens = 20, 32
    with LLM(
        "demo",
        use_tqdm_on_load=False,
        activation_dtype="float32",
        kv_cache_dtype="float32",
    ) as llm:
        outputs = llm.generate(
            requests(llm, count),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0),
            use_tqdm=False,
        )
    path = Path(open_checkpoint("demo").source.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    num_compared = num_close = 0
    for output in outputs:
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            ids = torch.tensor([[*output.prompt_token_ids, *tokens]])
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logits.topk(2).values
        tolerance = 20 * torch.finfo(torch.float32).eps * 576**0.5 * float(logits.abs().max())
        for row, token in enumerate(tokens):
            ours = output.outputs[0].logprobs[row][token].logprob
            assert abs(ours - float(logprobs[row, token])) < tolerance
            if best[row, 0] - best[row, 1] > tolerance:
                assert int(logits[row].argmax()) == token
                num_compared += 1
            else:
                num_close += 1
    assert num_compared > 20 * num_close
