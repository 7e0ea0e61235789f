"""The Gumbel-max draw: arg-max of log-weight + noise, without the noise of a whole vocabulary.

Nearly every token could only win with noise that very few have. The best total among the most
probable tokens is a bound: any other token needs noise of at least what it lacks to it, and the
leading bits of its random number say whether it may have that. Only for those that may is the noise
computed, so the result is the same token, ties included, as if it were for all.
"""

import numpy as np

from eyas.sampling.noise import Floats, gumbel, loud_gumbel
from eyas.sampling.processors import Candidates, top_k_indices

_FEW = 4096  # the noise of so many candidates costs less than sorting them out
_HEAD = 128  # enough for a good bound; their noise costs little more than that of one


def gumbel_max(
    left: Candidates, vocab_size: int, seed: int, sample_index: int, position: int
) -> int:
    """The candidate with the greatest ``log_weights + gumbel(...)``; of equals the lowest id."""
    if len(left.ids) == 1:
        return int(left.ids[0])
    if len(left.ids) <= _FEW:
        noise = gumbel(seed, sample_index, position, left.ids)
        return int(left.ids[np.argmax(left.log_weights + noise)])
    weights_V = _over_vocabulary(left, vocab_size)
    head = top_k_indices(weights_V, _HEAD)
    head_totals = weights_V[head] + gumbel(seed, sample_index, position, head)
    bound = head_totals.max()
    # To reach the bound, a token outside the head needs the noise to lift the head's least weight
    # to it, as it has no more than that.
    needed = float(bound - weights_V[head].min())
    loud, noise = loud_gumbel(seed, sample_index, position, vocab_size, needed)
    ids = np.concatenate([head, loud])
    totals = np.concatenate([head_totals, weights_V[loud] + noise])
    return int(ids[totals == totals.max()].min())


def _over_vocabulary(left: Candidates, vocab_size: int) -> Floats:
    """Log-weights of all tokens [V]: -inf for those that are no candidates."""
    if len(left.ids) == vocab_size:
        return left.log_weights
    weights_V = np.full(vocab_size, -np.inf)
    weights_V[left.ids] = left.log_weights
    return weights_V
