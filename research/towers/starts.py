"""Encoders to start from that are no folder: the architecture of a model with new weights."""

import os

from sentence_transformers import SentenceTransformer


def minilm_from_scratch() -> SentenceTransformer:
    """MiniLM's architecture and word pieces with new weights; ``MINILM`` names the folder or hub model."""
    model = SentenceTransformer(
        os.environ.get("MINILM", "sentence-transformers/all-MiniLM-L6-v2"), device="cpu"
    )
    transformer = model[0].auto_model
    transformer.apply(transformer._init_weights)
    return model
