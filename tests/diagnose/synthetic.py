"""Small paired embeddings for the tests of the report."""

import numpy as np

from weince.diagnose.reading import EmbeddedPairs, make_pairs


def views(pairs=400, dim=6, noise=0.5, seed=0):
    """Two noisy views of Gaussian points, each (pairs, dim)."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((pairs, dim))
    return z, z + noise * rng.standard_normal(z.shape)


def two_encoders(gap=0.6, pairs=512, dim=16):
    """Views like those of two encoders: a fixed vector is added to one view and subtracted from the other."""
    rng = np.random.default_rng(0)
    items, here, there = rng.standard_normal((3, pairs, dim))
    apart = gap * rng.standard_normal(dim)
    return items + 0.6 * here + apart, items + 0.6 * there - apart


def crowd(share, pairs=400, **options):
    """The same views, but this share of the unrelated pairs is moved almost to one point."""
    z_i, z_j = views(pairs, **options)
    rng = np.random.default_rng(1)
    chosen = rng.permutation(pairs)[: round(share * pairs)]
    place = 3 * rng.standard_normal(z_i.shape[1])
    for z in (z_i, z_j):
        z[chosen] = place + 0.01 * rng.standard_normal((len(chosen), z.shape[1]))
    return z_i, z_j


def small(name="small", **options) -> EmbeddedPairs:
    return make_pairs(name, *views(**options))
