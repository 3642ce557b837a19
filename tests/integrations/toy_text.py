"""Sentences for the small encoder of these tests."""

import random

WORDS = "a the of to in is on it he she cat dog fish bird tree house river sun moon eats sees runs".split(" ")


def column(rows, seed):
    """Sentences of different lengths."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(2, 9))) for _ in range(rows)]


def features(model, columns, rows=12):
    """Tokens of some columns, as the trainer hands them to a loss."""
    return [model.preprocess(column(rows, seed)) for seed in range(columns)]
