from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eyas.sampling.history import TokenCounts
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState

tokens = st.lists(st.integers(0, 60), max_size=40)


def as_dict(ids, counts):
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


@given(tokens, st.lists(tokens, max_size=4), tokens)
def test_counts_of_a_growing_sequence(first, chunks, extra):
    counts, known = TokenCounts(first), list(first)
    for chunk in chunks:
        counts.extend(chunk)
        known += chunk
        assert as_dict(*counts.with_extra(extra)) == Counter(known + extra)
        assert as_dict(*counts.with_extra(())) == Counter(known)


@given(tokens, tokens, tokens, st.integers(1, 5))
def test_prefix_is_the_same_whether_tokens_are_extra_or_accepted(prompt, output, extra, longest):
    rules = SamplingRules(
        repetition_penalty=1.5, presence_penalty=1, bad_words=((7,) * longest, (3,))
    )
    state = SampleState(rules, 0, 0, len(prompt), [*prompt, *output])
    before = state.prefix(())
    drafted = state.prefix(extra)
    assert drafted.num_output == len(output) + len(extra) == state.position(len(extra))
    # As many as the longest bad word has before its last token, from the output only.
    assert drafted.tail == tuple((output + extra)[max(len(output + extra) - longest + 1, 0) :])
    assert set(drafted.seen.tolist()) == {*prompt, *output, *extra}
    counted = as_dict(drafted.output_ids, drafted.output_counts)
    assert counted == Counter(output + extra)
    after = state.prefix(())
    assert (after.tail, after.num_output) == (before.tail, before.num_output)
    assert as_dict(after.output_ids, after.output_counts) == Counter(output)

    state.append(extra)
    accepted = state.prefix(())
    assert (accepted.tail, accepted.num_output) == (drafted.tail, drafted.num_output)
    assert set(accepted.seen.tolist()) == set(drafted.seen.tolist())
    assert as_dict(accepted.output_ids, accepted.output_counts) == counted
