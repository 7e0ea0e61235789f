"""Statistics and report against numbers counted by hand."""

import dataclasses

import pytest

from eyas.engine.metrics import EngineMetrics
from eyas.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from eyas.engine.spec_report import (
    SpecDecodeStats,
    domination_warnings,
    ends_in_cycle,
    format_report,
    low_acceptance_warning,
)
from eyas.types import RequestWork, Verdict

# Four decode steps of one request: a draft of 3 of which 2 were accepted, one of 2 of which all
# were, one of 3 of which none was, and a step without a draft: (2+1) + (2+1) + 1 + 1 tokens.
STEPS = (((7, 8, 9), 2), ((7, 8), 2), ((7, 8, 9), 0), ((), 0))
STATS = SpecDecodeStats(
    total_num_output_tokens=9,
    num_drafts=3,
    num_draft_tokens=8,
    num_accepted_tokens=4,
    num_draft_tokens_per_pos=(3, 3, 2),
    num_accepted_tokens_per_pos=(2, 2, 0),
    num_decode_steps=4,
    num_decode_tokens=8,
)
REPORT = """\
--------------------------------------------------
total_num_output_tokens: 9
num_drafts: 3
num_draft_tokens: 8
num_accepted_tokens: 4
mean acceptance length: 2.33
--------------------------------------------------
acceptance at token 0: 0.67
acceptance at token 1: 0.67
acceptance at token 2: 0.00 (drafted 2)
share of steps that drafted: 0.75
tokens per target forward: 2.00
--------------------------------------------------"""


def verdict(num_tokens, num_accepted, error=None):
    tokens = tuple(range(7, 7 + num_tokens))
    return Verdict("r", tokens, num_accepted, (), (), (), 0, error)


def work(drafts):
    return RequestWork("r", 5, 1 + len(drafts), drafts, (), 3)


def test_counting():
    metrics = EngineMetrics()
    metrics.record(work(()), verdict(0, 0), 0, 0)  # a chunk of the prompt
    metrics.record(work(()), verdict(1, 0), 1, 0)  # the prompt's end
    count = 1
    for drafts, num_accepted in STEPS:
        metrics.record(
            work(drafts), verdict(num_accepted + 1, num_accepted), num_accepted + 1, count
        )
        count += num_accepted + 1
    metrics.record(work((7, 8)), verdict(0, 0, "failed"), 0, count)
    assert metrics.spec_stats() == STATS


def test_acceptance_is_counted_before_stop_rules_cut():
    metrics = EngineMetrics()
    metrics.record(work((7, 8, 9)), verdict(4, 3), 1, 1)
    stats = metrics.spec_stats()
    assert (stats.total_num_output_tokens, stats.num_accepted_tokens) == (1, 3)
    assert stats.num_decode_tokens == 4


def test_report():
    assert format_report(STATS) == REPORT
    assert STATS.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert STATS.acceptance_per_pos == pytest.approx((2 / 3, 2 / 3, 0))


def test_report_of_a_run_without_drafts():
    stats = EngineMetrics().spec_stats()
    text = format_report(stats)
    assert "mean acceptance length: 1.00" in text
    assert "acceptance at" not in text
    assert "share of steps that drafted: 0.00\ntokens per target forward: 1.00" in text
    assert low_acceptance_warning(stats) is None


@pytest.mark.parametrize(
    ("num_drafts", "num_accepted", "warns"),
    [(100, 4, True), (100, 5, False), (99, 0, False), (1000, 49, True)],
)
def test_low_acceptance(num_drafts, num_accepted, warns):
    stats = dataclasses.replace(
        STATS, num_drafts=num_drafts, num_accepted_tokens_per_pos=(num_accepted, 0)
    )
    warning = low_acceptance_warning(stats)
    assert (warning is not None) == warns
    if num_drafts == 1000:
        assert "only 4.9% of 1000 drafts" in warning


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], False),
        ([1, 1], False),
        ([1, 1, 1], True),
        ([1, 2, 1, 2, 1], False),  # two and a half times
        ([1, 2, 1, 2, 1, 2], True),
        ([*range(6), 1, 2, 1, 2, 1, 2], False),  # exactly half
        ([*range(5), 1, 2, 1, 2, 1, 2], True),
        ([9, *[1, 2] * 3, 1], True),  # the last repeat is cut
        ([*[1, 2] * 3, 9], False),  # not at the end
        ([*range(32)] * 3, True),
        ([*range(33)] * 3, False),
        ([*range(50)], False),
    ],
)
def test_cycles(token_ids, expected):
    assert ends_in_cycle(token_ids) is expected


def output(request_id, prompt, *samples):
    """``samples``: token ids and how many of them were accepted drafts."""
    completions = [
        CompletionOutput(
            index=i,
            text="",
            token_ids=list(tokens),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="length",
            stop_reason=None,
            seed=0,
            draft_positions=[0] * num_accepted + [None] * (len(tokens) - num_accepted),
            error=None,
        )
        for i, (tokens, num_accepted) in enumerate(samples)
    ]
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0, 0, 0, 0)
    return RequestOutput(request_id, None, prompt, None, completions, True, 0, metrics)


VARIED = range(40)
LOOP = [*range(10), *[1, 2, 3] * 10]


def test_no_warning_without_domination():
    outputs = [output(str(i), [i], (VARIED, 20)) for i in range(2)]
    assert domination_warnings(outputs) == []  # half each
    assert domination_warnings([output("a", [1], (VARIED, 20))]) == []  # a single prompt
    assert domination_warnings([]) == []
    assert domination_warnings([output(str(i), [i], (LOOP, 0)) for i in range(2)]) == []


def test_one_prompt_dominates():
    outputs = [output("a", [1], (VARIED, 5)), output("b", [2], (VARIED, 10), (VARIED, 1))]
    (warning,) = domination_warnings([*outputs, output("c", [3], (VARIED, 5))])
    assert "prompt of request b gives 11 of the 21 accepted tokens of 3 prompts" in warning
    # The same prompt in several requests counts together.
    outputs = [output(name, [1], (VARIED, 10)) for name in "ab"] + [output("c", [2], (VARIED, 15))]
    (warning,) = domination_warnings(outputs)
    assert "prompt of request a gives 20 of the 35" in warning


def test_cycles_dominate():
    outputs = [output("a", [1], (LOOP, 6)), output("b", [2], (LOOP, 5), (VARIED, 4))]
    outputs.append(output("c", [3], (VARIED, 6)))
    (warning,) = domination_warnings(outputs)
    assert warning.startswith("11 of the 21 accepted tokens belong to outputs that end in a rep")
    assert "(2 of them)" in warning
    # A single prompt that loops is worth the warning, too.
    (warning,) = domination_warnings([output("a", [1], (LOOP, 6))])
    assert "cycle" in warning
