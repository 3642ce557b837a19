"""The losses inside other libraries, each in a module of its own that imports its library.

- :mod:`weince.integrations.sentence_transformers`: losses for ``SentenceTransformerTrainer``.
- :mod:`weince.integrations.lightning`: a callback that logs the tail.
- :mod:`weince.integrations.metric_learning`: a loss called as pytorch-metric-learning calls its own.
"""
