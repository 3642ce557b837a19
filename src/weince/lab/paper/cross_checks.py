"""Two cross-checks of the link test: the paper's grid of (lam, tau), and cross-validation over batches."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weince.evt import choice
from weince.evt.arrays import Bounds, check_least
from weince.evt.link_fit import fit_pair
from weince.evt.link_test import batch_gains


class GridFit(NamedTuple):
    """The best point of a grid over (lam, tau), and the best with lam = 0."""

    lam: float
    tau: float
    loglik: float
    tau0: float
    loglik0: float


def fit_grid(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    lams: int = 21,
    taus: int = 21,
    tau_range: Bounds = (0.01, 2.0),
) -> GridFit:
    """Make the same fit by exhaustive search, as a cross-check: even steps of lam, logarithmic steps of tau.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.cross_checks import fit_grid
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> bool(0 <= fit_grid(*bank).lam <= 1)
        True
    """
    if lams < 2 or taus < 2 or not 0.0 < tau_range[0] < tau_range[1]:
        raise ValueError(f"need 2 lams, 2 taus and 0 < low < high; got {lams}, {taus} and {tau_range}")
    choices = choice.read_choices(scores, positives, batches)
    lam, tau = np.linspace(0.0, 1.0, lams), np.geomspace(*tau_range, taus)
    value = np.array(
        [[-choice.log_partitions(choices, np.array([1.0 - x, x]) / y).sum() for y in tau] for x in lam]
    )
    i, j = np.unravel_index(int(value.argmax()), value.shape)
    j0 = int(value[0].argmax())
    return GridFit(float(lam[i]), float(tau[j]), float(value[i, j]), float(tau[j0]), float(value[0, j0]))


class CrossValidation(NamedTuple):
    """Result of `cross_validate`: the mean held-out gain, its standard deviation over folds, and each fold's.

    A fold whose remaining batches are perfectly separated has NaN as its lam.
    """

    gain: float
    sd: float
    gains: tuple[float, ...]
    lams: tuple[float, ...]


def cross_validate(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    folds: int = 5,
    rng: int | np.random.Generator = 0,
) -> CrossValidation:
    """Fit the links to all batches but those of a fold and judge them on the fold, over a random division.

    Args:
        scores: ``(anchors, candidates)`` cosines, as in `weince.evt.link_test`.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor.
        folds: Number of folds.
        rng: Seed or generator of the division.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.cross_checks import cross_validate
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> len(cross_validate(*bank, folds=4).gains)
        4
    """
    check_least(folds=(folds, 2))
    choices = choice.read_choices(scores, positives, batches)
    order = np.random.default_rng(rng).permutation(len(choices.labels)).astype(np.int64)
    gains, lams, start = [], [], None
    for fold in np.array_split(order, min(folds, len(order))):
        pair = fit_pair(choices.take(np.setdiff1d(order, fold)), start)
        start = None if pair.separated else pair
        gains.append(float(batch_gains(choices.take(fold), pair).mean()))
        lams.append(pair.lam_tau[0])
    return CrossValidation(float(np.mean(gains)), float(np.std(gains, ddof=1)), tuple(gains), tuple(lams))
