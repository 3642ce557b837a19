"""Positives drawn from a known link: what a measurement would show if that link held."""

import numpy as np
from numpy.typing import ArrayLike

from weince.evt import choice
from weince.evt.arrays import Integers


def draw_positives(
    scores: ArrayLike, lam: float, tau: ArrayLike, *, rng: int | np.random.Generator = 0
) -> Integers:
    """Draw a positive (anchors,) for every row of ``scores`` from the blended link with known lam and tau.

    ``tau`` is one temperature, or one for each anchor.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.draws import draw_positives
        >>> scores = np.random.default_rng(0).uniform(-1, 0.9, size=(100, 8))
        >>> draw_positives(scores, 0.4, 0.2).shape
        (100,)
    """
    s, taus = np.asarray(scores, dtype=np.float64), np.asarray(tau, dtype=np.float64)
    if not 0.0 <= lam <= 1.0 or not np.all(taus > 0.0):
        raise ValueError(f"lam must lie in [0, 1] and tau be positive; got {lam} and {taus}")
    if taus.shape not in ((), (len(s),)):
        raise ValueError(f"tau must be a number or of shape ({len(s)},), one per anchor; got {taus.shape}")
    taus = np.broadcast_to(taus, len(s))[:, None]
    generator = np.random.default_rng(rng)
    positives = np.empty(len(s), dtype=np.int64)
    for rows in choice.blocks(*s.shape):
        present = np.isfinite(s[rows])
        block = np.where(present, s[rows], 0.0)
        logits = ((1.0 - lam) * block + lam * choice.shortfall(block)) / taus[rows]
        # The largest logit plus Gumbel noise falls on each candidate with its softmax probability.
        noise = generator.gumbel(size=block.shape)
        positives[rows] = np.argmax(np.where(present, logits + noise, -np.inf), axis=1)
    return positives
