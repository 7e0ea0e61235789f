import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.sampling.logprobs import token_logprobs
from eyas.sampling.processors import LogitsError

EPS = np.finfo(np.float64).eps


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.data())
def test_order_and_ranks_with_ties(logits, data):
    size = len(logits)
    token = data.draw(st.integers(0, size - 1))
    top = data.draw(st.integers(-1, size))
    got = token_logprobs(torch.tensor(logits, dtype=torch.float32), token, top)
    order = sorted(range(size), key=lambda i: (-logits[i], i))[: size if top == -1 else top]
    assert got.token_ids == (token, *(i for i in order if i != token))
    assert got.ranks == tuple(1 + sum(x > logits[i] for x in logits) for i in got.token_ids)
    assert len(got.logprobs) == len(got.token_ids)


@pytest.mark.parametrize("shift", [0.0, -1000.0, 1e5])
def test_values_are_the_log_softmax(shift):
    logits = (torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 8 + shift).float()
    got = token_logprobs(logits, 17, -1)
    want = logits.double().log_softmax(-1)
    assert sorted(got.token_ids) == list(range(3000))
    torch.testing.assert_close(
        torch.tensor(got.logprobs, dtype=torch.float64),
        want[list(got.token_ids)],
        rtol=0,
        atol=8 * EPS * float(logits.abs().max() + 20),
    )
    assert abs(np.exp(got.logprobs).sum() - 1) < 3000 * EPS * float(logits.abs().max() + 20)


def test_only_the_token_itself():
    got = token_logprobs(torch.tensor([0.0, 0.0]), 1, 0)
    assert (got.token_ids, got.ranks) == ((1,), (1,))
    assert got.logprobs[0] == pytest.approx(-np.log(2), abs=EPS)
    assert type(got.logprobs[0]) is float
    assert type(got.token_ids[0]) is type(got.ranks[0]) is int


def test_a_row_has_its_bits_wherever_it_lies():
    rows = torch.randn(4, 777, generator=torch.Generator().manual_seed(1))
    columns = rows.T.contiguous()
    for i in range(4):
        alone = token_logprobs(rows[i].clone(), 5, 20)
        assert alone == token_logprobs(rows[i], 5, 20) == token_logprobs(columns[:, i], 5, 20)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(LogitsError, match="nan at token 1"):
        token_logprobs(torch.tensor([0.0, float("nan")]), 0, 0)
