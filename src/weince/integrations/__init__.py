"""Adapters that use the losses in other libraries: one module per library, which imports it.

- :mod:`weince.integrations.sentence_transformers`: losses for ``SentenceTransformerTrainer``.
- :mod:`weince.integrations.lightning`: a callback that logs the tail.
- :mod:`weince.integrations.metric_learning`: losses with the call signature of pytorch-metric-learning.
"""
