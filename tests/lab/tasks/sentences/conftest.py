"""Toy text data: words, sentences, STS pairs, and a BERT with two small layers."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the text runs need weince[text]")

WORDS = [
    "a", "the", "cat", "dog", "bird", "sun", "tree", "river", "house", "fish",
    "sees", "eats", "runs", "sings", "near", "under", "old", "small", "red", "and",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct sentences of 3 to 9 words."""
    chosen = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(chosen.choices(WORDS, k=chosen.randint(3, 9)))] = None
    return list(found)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> Path:
    """Folder of a small transformer with dropout, and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("toy") / "model"
    vocabulary = folder.parent / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *WORDS, *"abcdefghijklmnopqrstuvwxyz."]) + "\n")
    tokenizer = BertTokenizer.from_pretrained(folder.parent, local_files_only=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("\n".join(sentences(100)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def toy_sts(tmp_path_factory) -> Path:
    """STS pairs whose score is 5 times the share of common words."""
    path = tmp_path_factory.mktemp("sts") / "sts.tsv"
    lines = ["task\tsubset\tsplit\tscore\tsentence1\tsentence2"]
    chosen = random.Random(1)
    for task, subset, split in [
        ("STSB", "x", "dev"), ("STSB", "x", "test"), ("STSB", "y", "test"), ("STS12", "z", "test"),
    ]:  # fmt: skip
        for first in sentences(20, seed=len(lines)):
            words = first.split()
            second = [word if chosen.random() < 0.6 else chosen.choice(WORDS) for word in words]
            score = 5 * sum(a == b for a, b in zip(words, second, strict=True)) / len(words)
            lines.append(f"{task}\t{subset}\t{split}\t{score:.3f}\t{first}\t{' '.join(second)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
