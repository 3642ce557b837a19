"""Small paired embeddings for the tests of the report."""

import numpy as np

from weince.embeddings import Pairs, make_pairs


def views(pairs=400, dim=6, noise=0.5, seed=0):
    """Two noisy views of Gaussian points, each (pairs, dim)."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((pairs, dim))
    return z, z + noise * rng.standard_normal(z.shape)


def small(name="small", **options) -> Pairs:
    return make_pairs(name, *views(**options))
