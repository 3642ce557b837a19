"""Sentence embeddings: unsupervised SimCSE and its evaluation on STS (the extra ``text``)."""
