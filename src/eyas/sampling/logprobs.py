"""Log-probabilities as users see them: of the raw target logits, whatever the sampling rules."""

import numpy as np

from eyas.sampling.processors import Logits, sort_descending, top_k_indices
from eyas.sampling.sampler import as_row
from eyas.types import TokenLogprobs


def token_logprobs(logits_V: Logits, token_id: int, top: int) -> TokenLogprobs:
    """The token first, then the ``top`` most probable ones without it (-1: the whole vocabulary).

    ``logits_V`` is one row in float32. The log-softmax is computed in float64, from this row alone.
    Equal ones are listed by ascending id and share a rank. Raises LogitsError for logits that
    aren't finite.
    """
    row = as_row(logits_V)
    scores_V = row.astype(np.float64)
    best = scores_V.max()
    log_total = best + np.log(np.exp(scores_V - best).sum())
    listed = top_k_indices(row, len(row) if top == -1 else top)
    listed = listed[sort_descending(row[listed])]
    # Everything greater is listed before, so the first of equals says how many are greater.
    ranks = 1 + np.searchsorted(-row[listed], -row[listed], side="left")
    others = listed != token_id
    own_rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return TokenLogprobs(
        token_ids=(token_id, *listed[others].tolist()),
        logprobs=(
            float(scores_V[token_id] - log_total),
            *(scores_V[listed[others]] - log_total).tolist(),
        ),
        ranks=(own_rank, *ranks[others].tolist()),
    )
