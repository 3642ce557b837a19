"""Sentences for the small encoder of these tests."""

import random

TEXT = "a cat and a dog see the bird on the tree in the sun it sings of the river she runs to the house he eats fish"
WORDS = sorted(set(TEXT.split()))


def column(rows, seed):
    """Sentences of different lengths."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(2, 9))) for _ in range(rows)]


def features(model, columns, rows=12):
    """Tokens of several columns, as the trainer passes them to a loss."""
    return [model.preprocess(column(rows, seed)) for seed in range(columns)]
