"""The draft_model drafter: what it proposes, how often that is accepted, and rejection sampling."""

import itertools

import pytest
import torch
from checkpoints import tiny_model
from harness import make_engine, run, tiny_checkpoint, tiny_target

from eyas import LLM, SamplingParams
from eyas.drafters.draft_model import ModelDrafter

K = 3


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("budget", [7, 64])
def test_the_target_as_its_own_draft_is_always_accepted(model_type, temperature, budget) -> None:
    """Over chunked prefill, several requests, cache hits, and (mistral) a sliding window."""
    overrides = (("sliding_window", 9),) if model_type == "mistral" else ()
    path = str(tiny_checkpoint(model_type, 0, overrides))
    with LLM(
        path,
        use_tqdm_on_load=False,
        kv_cache_memory=8 << 20,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        block_size=4,
        speculative_config={"model": path, "num_speculative_tokens": K},
    ) as llm:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=1 + 5 * (K + 1),
            ignore_eos=True,
            seed=3,
            repetition_penalty=1.1,
        )
        shared = [5 + i % 9 for i in range(21)]
        prompts = [[5, 6, 7], shared, [*shared, 30, 31], [*shared, 32]]
        for output in llm.generate(prompts, params, use_tqdm=False):
            expected = [None, *[*range(K), None] * 5]
            if budget > 3 * (K + 1):  # else the budget cuts drafts short
                assert output.outputs[0].draft_positions == expected
        stats = llm.spec_stats()
        assert stats.num_drafts > 0
        assert stats.num_accepted_tokens_per_pos == stats.num_draft_tokens_per_pos


class Recorder:
    """Passes everything on to a ModelDrafter, and keeps what it was asked and answered."""

    def __init__(self, inner: ModelDrafter) -> None:
        self.inner = inner
        self.needs = inner.needs
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []

    def propose(self, context):
        drafts = self.inner.propose(context)
        for request, draft in zip(context.requests, drafts, strict=True):
            self.seen.append((list(request.state.token_ids), draft.tokens))
        return drafts

    def forget(self, request_ids):
        self.inner.forget(request_ids)


@pytest.mark.parametrize(
    ("draft_type", "overrides"), [("llama", ()), ("mistral", (("sliding_window", 6),))]
)
def test_every_draft_token_is_that_of_a_cache_free_forward(draft_type, overrides) -> None:
    """Against transformers on the whole prefix, with rejections, chunks and preemption between."""
    target, ops = tiny_target("llama", 0)
    draft, _ = tiny_target(draft_type, 1, overrides, "draft")
    oracle = tiny_model(draft_type, 1, **dict(overrides))
    recorder = Recorder(ModelDrafter(draft, ops, "exact"))
    engine = make_engine(
        target,
        ops,
        lambda target, ops: recorder,
        max_drafts=K,
        max_num_seqs=3,
        max_num_batched_tokens=11,
        block_size=4,
        max_model_len=64,
        num_blocks=(20, 20),
    )
    prompts = [[5 + i % 7 for i in range(23)], [9, 8, 7], [5 + i % 7 for i in range(17)]]
    params = [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)] * 3
    run(engine, prompts, params, arrivals=[0, 1, 9])
    stats = engine.spec_stats()
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    num_checked = 0
    for known, tokens in recorder.seen:
        if not tokens:
            continue
        with torch.no_grad():
            logits = oracle(torch.tensor([[*known, *tokens]])).logits[0, len(known) - 1 : -1]
        best = logits.topk(2).values
        for row, token in enumerate(tokens):
            if best[row, 0] - best[row, 1] > 1e-3:
                assert int(logits[row].argmax()) == token
                num_checked += 1
    assert num_checked > 60


def test_rejection_sampling_has_the_targets_distribution() -> None:
    """Chi-square on triples of tokens through the engine, against transformers' probabilities.

    The first token is plain, the other two come from verifying the draft model's proposals.
    """
    allowed, prompt, num_samples = [5, 9, 17], [7, 8, 9], 1500
    target, ops = tiny_target("llama", 0)
    draft, _ = tiny_target("llama", 1, (), "draft")
    engine = make_engine(
        target,
        ops,
        lambda target, ops: ModelDrafter(draft, ops, "rejection"),
        acceptance="rejection",
        max_drafts=2,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        poison=False,
    )
    params = SamplingParams(
        n=num_samples,
        temperature=1.5,
        allowed_token_ids=allowed,
        max_tokens=3,
        seed=11,
        ignore_eos=True,
        detokenize=False,
    )
    (output,) = run(engine, [prompt], [params])
    counts = dict.fromkeys(itertools.product(allowed, repeat=3), 0)
    for sample in output.outputs:
        counts[tuple(sample.token_ids)] += 1

    oracle = tiny_model("llama", 0)
    chi_square = 0.0
    for triple, count in counts.items():
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *triple]])).logits[0]
        probability = 1.0
        for position, token in enumerate(triple, start=len(prompt) - 1):
            probs = torch.softmax(logits[position, allowed].double() / 1.5, dim=-1)
            probability *= float(probs[allowed.index(token)])
        expected = num_samples * probability
        assert expected > 1
        chi_square += (count - expected) ** 2 / expected
    stats = engine.spec_stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.99
    # 26 degrees of freedom: 54.05 is the 0.1 % point (and the seed is fixed).
    assert chi_square < 54.05


def test_rejection_mode_repeats_with_its_seed() -> None:
    path = str(tiny_checkpoint("llama", 0))
    texts = set()
    for _ in range(2):
        with LLM(
            path,
            use_tqdm_on_load=False,
            kv_cache_memory=8 << 20,
            speculative_config={
                "model": str(tiny_checkpoint("llama", 1)),
                "num_speculative_tokens": 2,
                "acceptance": "rejection",
            },
        ) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
            texts.add(tuple(llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids))
    assert len(texts) == 1


def test_a_draft_that_yields_no_logits_ends_the_draft_only() -> None:
    """A draft model full of NaN drafts nothing; the target's text is the plain one."""
    target, ops = tiny_target("llama", 0)
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)]
    plain = run(make_engine(target, ops), [[5, 6]], params)

    class Broken:
        groups = ()

        def forward(self, batch, kv):
            return torch.full((len(batch.token_ids_T), 4), float("nan"))

        def logits(self, hidden_RH):
            return torch.full((len(hidden_RH), target.vocab_size), float("nan"))

    engine = make_engine(target, ops, lambda target, ops: ModelDrafter(Broken(), ops, "exact"))
    assert run(engine, [[5, 6]], params)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert engine.spec_stats().num_drafts == 0
