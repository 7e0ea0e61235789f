"""The processors against those of transformers, on logits without ties."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState, distribution

VOCAB = 500
PROMPT, OUTPUT = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 9]
CASES = [
    (SamplingRules(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    (SamplingRules(top_k=7), [TopKLogitsWarper(7)]),
    (SamplingRules(top_p=0.83), [TopPLogitsWarper(0.83)]),
    (SamplingRules(min_p=0.07), [MinPLogitsWarper(0.07)]),
    (SamplingRules(repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
    (SamplingRules(repetition_penalty=0.6), [RepetitionPenaltyLogitsProcessor(0.6)]),
    (
        SamplingRules(bad_words=((11,), (3, 9, 12), (5, 9, 13))),
        [NoBadWordsLogitsProcessor([[11], [3, 9, 12], [5, 9, 13]], eos_token_id=0)],
    ),
    (
        SamplingRules(min_tokens=7, stop_ids=(8,)),
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, 8, device="cpu")],
    ),
    (
        SamplingRules(min_tokens=6, stop_ids=(8,)),
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, 8, device="cpu")],
    ),
    (
        SamplingRules(repetition_penalty=1.3, temperature=1.4, min_p=0.01, top_k=40, top_p=0.9),
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.4),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ],
    ),
]


@pytest.mark.parametrize(("rules", "processors"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_same_support_and_probabilities(rules, processors, seed):
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    logits[[8, 11, 12, 13]] += 4  # so that masks matter
    scores = torch.from_numpy(logits)[None]
    ids = torch.tensor([PROMPT + OUTPUT])
    for processor in processors:
        scores = processor(ids, scores)
    want = scores[0].double().softmax(-1)
    state = SampleState(rules, 0, 0, len(PROMPT), PROMPT + OUTPUT)
    got = distribution(torch.from_numpy(logits), state)
    assert torch.equal(got > 0, want > 0)
    # transformers divides and multiplies the logits in float32, so they are off by an epsilon each.
    largest = float(scores[0][want > 0].abs().max())
    steps = 2 * len(processors)
    rtol = 2 * steps * largest * float(np.finfo(np.float32).eps)
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
