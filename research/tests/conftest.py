"""A toy encoder and its texts, as the tests of the lab make them."""

from lab.tasks.sentences.conftest import toy_model, toy_sts, toy_text

__all__ = ["toy_model", "toy_sts", "toy_text"]
