"""The losses in the trainer of sentence-transformers and on two ranks, and models from folders."""

import importlib.util
import sys

import pytest
import ranks_text
import torch
from datasets import Dataset
from ranks_text import OPEN, REPLAYED, cached_weince, weince_loss
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import nn
from toy_text import column

from weince.integrations import sentence_transformers as integration
from weince.integrations.sentence_transformers import load_model


def train(model, loss, folder, **options):
    pairs = Dataset.from_dict({"anchor": column(33, 0), "positive": column(33, 1), "negative": column(33, 2)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        seed=1,
        **{"max_steps": 4, **options},
    )
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    trainer.train()
    return trainer


def test_the_trainer_trains_saves_and_loads_again(minilm_folder, tmp_path):
    model = SentenceTransformer(str(minilm_folder), device="cpu")
    sentences = column(5, 7)
    before = model.encode(sentences)
    train(model, weince_loss(model), tmp_path / "run")
    after = model.encode(sentences)
    assert abs(after - before).max() > 1e-3
    model.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(sentences)
    torch.testing.assert_close(torch.tensor(again), torch.tensor(after), rtol=0, atol=1e-6)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "loss:LossAdapter" in card
    assert '"temperature": 0.05' in card


def test_the_trainer_with_an_odd_last_batch_accumulation_and_evaluation(tiny_folder, tmp_path):
    """33 pairs in batches of 8 leave one row for the last. A learned temperature trains with the model."""
    model = SentenceTransformer(str(tiny_folder), device="cpu")
    temperature = nn.Parameter(torch.tensor(0.1))
    loss = weince_loss(model, temperature=temperature)
    trainer = train(model, loss, tmp_path, max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=2)
    assert trainer.state.global_step == 3
    assert float(temperature.detach()) != pytest.approx(0.1, abs=1e-6)
    metrics = trainer.evaluate(Dataset.from_dict({"anchor": column(9, 3), "positive": column(9, 4)}))
    assert 0 < metrics["eval_loss"] < 20


def test_the_trainer_takes_the_same_steps_cached_and_plain(tiny_folder, tmp_path):
    """Compare the weights after four optimizer steps of accumulated batches, without dropout."""
    weights = []
    for cached in (False, True):
        model = SentenceTransformer(str(tiny_folder), device="cpu").double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        loss = cached_weince(model, **OPEN, mini_batch_size=3) if cached else weince_loss(model, **OPEN)
        train(model, loss, tmp_path / str(cached), gradient_accumulation_steps=2)
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[1], weights[0], **REPLAYED)


@pytest.mark.long
@pytest.mark.posix
def test_two_ranks_average_to_one_process(tiny_folder, tmp_path):
    """Gather over gloo, plain and cached, with hard negatives, texts that are equal on both ranks, different numbers
    of rows and a learned temperature.

    Also test two towers with cached activations in plain DDP, and the loss for pytorch-metric-learning in its
    distributed wrapper, since starting ranks is slow.
    """
    found = ranks_text.run(2, tiny_folder, tmp_path)
    wanted = {"towers": ranks_text.towers_step(slice(0, 12))}
    for name in ranks_text.STEPS:
        model = SentenceTransformer(str(tiny_folder), device="cpu").double().eval()
        wanted[name] = ranks_text.step(name, model, slice(0, 12))
    for name, whole in wanted.items():
        mean = torch.stack([rank[name]["loss"] for rank in found]).mean()
        torch.testing.assert_close(mean, whole["loss"], rtol=1e-9, atol=1e-10)
        assert whole["gradients"][0].any()
        for rank in found:
            for got, gradient in zip(rank[name]["gradients"], whole["gradients"], strict=True):
                torch.testing.assert_close(got, gradient, **REPLAYED)
    alone = [rank["alone"] for rank in found]
    assert alone[0] != pytest.approx(alone[1])
    labelled = torch.stack([rank["labelled"] for rank in found]).mean(0)  # as DDP averages
    torch.testing.assert_close(labelled, ranks_text.labelled_step(slice(12)), rtol=1e-9, atol=1e-11)


def test_models_are_loaded_from_folders(tiny_folder):
    sentences = column(3, 0)
    wanted = SentenceTransformer(str(tiny_folder), device="cpu").encode(sentences)
    for name in (tiny_folder, str(tiny_folder)):
        assert (load_model(name, device="cpu").encode(sentences) == wanted).all()


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for model, message in {
        tmp_path / "missing": "^no model folder .*missing$",
        "./missing": "^no model folder ./missing$",
        tmp_path / "empty": "^cannot load model '.*empty' from the folder: ",
        tmp_path / "broken": "^cannot load model '.*broken' from the folder: ",
        "nobody/nothing": r"^cannot load model 'nobody/nothing' from the hub('s cache .*is there a network.*)?: ",
    }.items():
        with pytest.raises(OSError, match=message) as raised:
            load_model(model, device="cpu")
        assert len(str(raised.value).splitlines()) == 1


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers.base.losses", None)
    spec = importlib.util.spec_from_file_location("fresh", integration.__file__)
    with pytest.raises(
        ImportError, match=r"needs sentence-transformers 6.0 or newer: pip install 'weince\[text\]'"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_evaluation_does_not_train(tiny_folder, tmp_path):
    """The trainer puts only the model into evaluation mode; the running slope of the loss must stay."""
    slopes = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model = SentenceTransformer(str(tiny_folder), device="cpu")
        loss = weince_loss(model)
        trainer = train(model, loss, tmp_path, max_steps=2)
        if evaluated:
            trainer.evaluate(Dataset.from_dict({"anchor": column(24, 3), "positive": column(24, 4)}))
        slopes.append(float(loss.loss.terms.slope.slope_now))
    assert slopes[0] == slopes[1]
