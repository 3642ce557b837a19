"""The example that pretrains a small BERT: masks, batches, and learning."""

import csv

import numpy as np
import pytest
import torch
from programs import script
from transformers import AutoModelForMaskedLM, AutoTokenizer

from weince.lab.tasks.registry import train
from weince.lab.tasks.sentences.config import TextRun


@pytest.fixture(scope="module")
def example():
    return script("examples/pretrain_small_bert.py")


@pytest.mark.parametrize("shape", [(200, 30), (1, 3), (7, 5)])
def test_masks(example, shape):
    rows = torch.randint(10, 1000, shape)
    seen, places, there = example.mask(rows, mask_id=3, vocabulary=1000)
    inner = shape[0] * (shape[1] - 2)
    assert len(set(places.tolist())) == len(places) == max(1, round(0.15 * inner))
    assert ((places % shape[1] != 0) & (places % shape[1] != shape[1] - 1)).all()
    assert torch.equal(there, rows.flatten()[places])
    untouched = torch.ones(rows.numel(), dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(seen.flatten()[untouched], rows.flatten()[untouched])
    if shape == (200, 30):  # 840 places: shares of 80, 10 and 10 %, to four standard deviations
        masked = (seen.flatten()[places] == 3).float().mean()
        same = (seen.flatten()[places] == there).float().mean()
        assert abs(masked - 0.8) < 4 * (0.16 / 840) ** 0.5
        assert abs(same - 0.1) < 4 * (0.09 / 840) ** 0.5


def test_batches_hold_each_sentence_once_and_one_length(example, toy_text, toy_model):
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    corpus = example.Corpus(toy_text, tokenizer, 64, torch.device("cpu"))
    lines = toy_text.read_text().splitlines()
    assert len(corpus.lengths) == len(lines)
    expected = sorted(tokenizer(line)["input_ids"] for line in lines)
    made = list(corpus.batches(np.arange(len(lines)), 40, np.random.default_rng(0)))
    assert sorted(row for batch in made for row in batch.tolist()) == expected
    assert all(batch.numel() <= 40 for batch in made)
    some = list(corpus.batches(np.arange(10), 40, np.random.default_rng(0)))
    assert sorted(row for batch in some for row in batch.tolist()) == sorted(
        tokenizer(line)["input_ids"] for line in lines[:10]
    )


def test_long_and_empty_lines(example, toy_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a dog\n\n" + "cat " * 10_000 + "\n")
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    corpus = example.Corpus(text, tokenizer, 16, torch.device("cpu"))
    assert corpus.lengths.tolist() == [4, 16]


def test_the_rate_rises_and_falls(example):
    assert example.rate(0.0) == 0
    assert example.rate(0.05) == pytest.approx(0.5)
    assert example.rate(0.1) == pytest.approx(1)
    assert example.rate(0.55) == pytest.approx(0.5)
    assert example.rate(1.0) == 0


def test_it_learns_and_simcse_starts_from_it(example, toy_text, toy_model, toy_sts, tmp_path, capsys):
    out = tmp_path / "small"
    line = [
        str(toy_text),
        "--tokenizer",
        str(toy_model),
        "--out",
        str(out),
        "--steps",
        "150",
        "--hidden",
        "32",
    ]
    options = example.parse([*line, "--layers", "2", "--tokens", "400", "--lr", "5e-3", "--device", "cpu"])
    reached = example.pretrain(options)
    with (out / "pretrain.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert reached < losses[0] - 0.3  # it starts near log(52), for 52 word pieces
    assert "held-out sentences" in capsys.readouterr().out
    model = AutoModelForMaskedLM.from_pretrained(out)
    corpus = example.Corpus(toy_text, AutoTokenizer.from_pretrained(out), 64, torch.device("cpu"))
    again = example.held_out_loss(model, corpus, np.arange(100), 4)
    assert abs(again - reached) < 0.5  # the head was saved too
    assert model.config.hidden_dropout_prob == 0.1  # SimCSE's only augmentation
    run = TextRun(toy_text, str(out), toy_sts, tmp_path / "run", sentences=32, batch=16, device="cpu")
    assert (train(run, bar=False) / "modules.json").is_file()


def test_it_learns_from_context(example, toy_model, tmp_path, capsys):
    """Each sentence repeats one word, so only the other tokens can tell the masked one."""
    text = tmp_path / "text.txt"
    words = ["cat", "dog", "bird", "sun", "tree", "river", "house", "fish"]
    text.write_text("".join(f"{' '.join([word] * count)}\n" for word in words for count in range(4, 12)) * 4)
    line = [str(text), "--tokenizer", str(toy_model), "--out", str(tmp_path / "out"), "--steps", "200"]
    options = example.parse([*line, "--hidden", "32", "--layers", "2", "--tokens", "400", "--lr", "5e-3"])
    reached = example.pretrain(options)
    said = capsys.readouterr().out
    assert f"frequencies alone: {np.log(8):.3f}" in said  # eight equally frequent words
    assert reached < np.log(8) - 1.5
    assert "WARNING" not in said
    example.pretrain(example.parse([*line[:-1], "1", "--hidden", "32", "--layers", "1", "--lr", "1e-6"]))
    assert "WARNING: no better than frequencies alone" in capsys.readouterr().out


def test_minutes_bound_the_time(example, toy_text, toy_model, tmp_path):
    line = [str(toy_text), "--tokenizer", str(toy_model), "--out", str(tmp_path / "x"), "--minutes", "0.01"]
    example.pretrain(
        example.parse([*line, "--hidden", "32", "--layers", "1", "--device", "cpu", "--log-every", "1"])
    )
    with (tmp_path / "x" / "pretrain.csv").open() as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    assert len(seconds) > 2
    assert max(seconds) <= 0.6


def test_help_and_errors(example, capsys, tmp_path):
    with pytest.raises(SystemExit):
        example.parse(["--help"])
    assert "example:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.parse([str(tmp_path / "none.txt"), "--tokenizer", "x", "--steps", "1"])
    assert "no such text file" in capsys.readouterr().err
