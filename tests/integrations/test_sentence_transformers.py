"""Comparison with the losses of sentence-transformers on real encoders: same value, gradient and interface."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from cases import CASES, learned
from ranks_text import OPEN, REPLAYED, cached_weince, weince_loss
from sentence_transformers import (
    SentenceTransformer,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from toy_text import WORDS, features

import weince
from weince import InfoNCELoss, TailConfig, progress
from weince.diagnose import pair_files
from weince.integrations.sentence_transformers import CachedLossAdapter, LossAdapter

CLOSED = {
    "tail": TailConfig(margin=1e9),
    "softmax_term": 0,
    "shortfall_term": 0,
}  # lam = 0, and no added terms


def step(model, loss, columns, labels=None, seed=3):
    """Value and gradients of a step, with seeded dropout."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(columns, labels)
    value.backward()
    return value.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same_step(one, other, **tolerance):
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert one[1].keys() == other[1].keys()
    assert len(one[1]) > 10
    assert max(float(g.abs().max()) for g in one[1].values()) > 1e-4
    for name, gradient in one[1].items():
        torch.testing.assert_close(
            gradient, other[1][name], **tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize("scale", [20.0, 5.0])
def test_without_the_correction_it_is_theirs(tiny, columns, scale):
    """InfoNCE, and WEINCE with lam = 0, equal their loss; every anchor sees the hard negatives of all rows."""
    tokens = features(tiny, columns)
    wanted = step(tiny, MultipleNegativesRankingLoss(tiny, scale=scale), tokens)
    for ours in (
        LossAdapter(tiny, InfoNCELoss(1 / scale, candidates="cross")),
        weince_loss(tiny, temperature=1 / scale, **CLOSED),
    ):
        assert_same_step(step(tiny, ours, tokens), wanted, rtol=1e-9, atol=1e-10)


def test_the_bare_loss_is_the_released_one(tiny):
    tiny.eval()
    tokens = features(tiny, 3)
    rows = [tiny(dict(part))["sentence_embedding"] for part in tokens]
    core = weince.WeinceLoss.released(0.05, candidates="cross").eval()(*rows[:2], negatives=rows[2])
    torch.testing.assert_close(step(tiny, weince_loss(tiny), tokens)[0], core.detach())
    torch.testing.assert_close(step(tiny, cached_weince(tiny, mini_batch_size=5), tokens)[0], core.detach())


def test_both_directions_are_their_symmetric_loss(tiny):
    tokens = features(tiny, 2)
    theirs = MultipleNegativesRankingLoss(
        tiny, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    ours = weince_loss(tiny, **CLOSED, candidates="clip")
    assert_same_step(step(tiny, ours, tokens), step(tiny, theirs, tokens), rtol=1e-9, atol=1e-10)


def test_a_trained_encoder_in_float32_agrees_too(minilm_folder):
    """In float64 both are equal; in float32 ours is about as close to that as theirs, on any CPU."""
    model = SentenceTransformer(str(minilm_folder), device="cpu").train()
    tokens = features(model, 3, rows=8)
    losses = (
        MultipleNegativesRankingLoss(model, scale=20.0),
        weince_loss(model, temperature=0.05, **CLOSED),
    )
    theirs, ours = (step(model, loss, tokens) for loss in losses)
    model.double()
    exact, twin = (step(model, loss, tokens) for loss in losses)
    assert_same_step(twin, exact, rtol=1e-9, atol=1e-10)
    roundings = 20.0 * 8 * torch.finfo(torch.float32).eps  # rounding of a score, times the scale
    assert abs(ours[0] - exact[0]) < roundings
    assert ours[1].keys() == exact[1].keys()
    for name, gradient in exact[1].items():
        off, allowed = ((found[1][name] - gradient).norm() for found in (ours, theirs))
        assert off <= 2 * allowed, f"{name}: ours is off by {off:.2e}, theirs by {allowed:.2e}"


def test_the_correction_is_that_of_the_core(tiny):
    """Embedding by hand and calling the core gives the same loss, and the correction has an effect here."""
    tokens = features(tiny, 3)
    found, _ = step(tiny, weince_loss(tiny, **OPEN), tokens)
    torch.manual_seed(3)
    anchors = tiny(dict(tokens[0]))["sentence_embedding"]
    wide = max(part["input_ids"].shape[1] for part in tokens[1:])
    both = {
        name: torch.cat(
            [nn.functional.pad(part[name], (0, wide - part[name].shape[1])) for part in tokens[1:]]
        )
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    positives, negatives = tiny(both)["sentence_embedding"].chunk(2)
    core = weince.WeinceLoss(0.05, **OPEN, candidates="cross")(
        anchors, positives, negatives=negatives, return_stats=True
    )
    torch.testing.assert_close(found, core.loss.detach())
    assert core.stats.lam.mean() > 0.1
    plain, _ = step(tiny, MultipleNegativesRankingLoss(tiny), tokens)
    assert abs(float(found - plain)) > 1e-2


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("mini_batch", [{"mini_batch_size": 5}, {"mini_batch_num_tokens": 20}], ids=str)
def test_cached_is_plain_without_dropout(tiny, columns, mini_batch):
    tiny.eval()
    tokens = features(tiny, columns)
    plain = step(tiny, weince_loss(tiny, **OPEN), tokens)
    cached = step(tiny, cached_weince(tiny, **OPEN, **mini_batch), tokens)
    assert_same_step(cached, plain, **REPLAYED)


def test_cached_is_plain_with_dropout(tiny):
    """With one mini-batch both draw the same dropout masks, and the second pass must redraw them."""
    tokens = features(tiny, 2)
    plain = step(tiny, weince_loss(tiny, **OPEN), tokens)
    cached = step(tiny, cached_weince(tiny, **OPEN, mini_batch_size=12), tokens)
    assert_same_step(cached, plain, **REPLAYED)


def test_cached_with_dropout_in_small_pieces(tiny):
    """Compare with a plain graph over the same mini-batches, which draws the same masks."""
    tokens = features(tiny, 2)
    cached = step(tiny, cached_weince(tiny, **OPEN, mini_batch_size=5), tokens)
    plain = weince_loss(tiny, **OPEN)

    def in_pieces(columns, labels):
        pieces = [
            [tiny(_rows(part, slice(i, i + 5)))["sentence_embedding"] for i in (0, 5, 10)] for part in columns
        ]
        return plain.compute_loss_from_embeddings([torch.cat(part) for part in pieces])

    assert_same_step(cached, step(tiny, in_pieces, tokens), **REPLAYED)


def _rows(tokens, rows):
    """These rows, cut to their longest sentence."""
    length = int(tokens["attention_mask"][rows].sum(1).max())
    return {name: v[rows, :length] if isinstance(v, torch.Tensor) else v for name, v in tokens.items()}


def test_cached_is_their_cached_one_without_the_correction(tiny):
    tokens = features(tiny, 3)
    theirs = step(tiny, CachedMultipleNegativesRankingLoss(tiny, mini_batch_size=5), tokens)
    ours = step(tiny, cached_weince(tiny, **CLOSED, mini_batch_size=5), tokens)
    assert_same_step(ours, theirs, rtol=1e-9, atol=1e-10)


def test_cached_scales_with_what_comes_after_it(tiny):
    """Gradient accumulation and loss scaling multiply the loss, and must scale the cached gradient too."""
    tokens = features(tiny, 2)
    loss = cached_weince(tiny, **OPEN, mini_batch_size=5)
    once = step(tiny, loss, tokens)
    half = step(tiny, lambda columns, labels: loss(columns, labels) / 2, tokens)
    for name, gradient in once[1].items():
        torch.testing.assert_close(half[1][name], gradient / 2)


def test_cached_without_gradients(tiny):
    tiny.eval()
    tokens = features(tiny, 2)
    with torch.no_grad():
        value = cached_weince(tiny, mini_batch_size=5)(tokens)
        torch.testing.assert_close(value, weince_loss(tiny)(tokens))
    assert not value.requires_grad


@pytest.mark.parametrize(("own", "dtype"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_embeddings_in_another_half_precision_than_that_of_autocast(tiny, own, dtype):
    tiny.eval()  # no running slope
    rows = [torch.randn(12, 16).to(own) for _ in range(4)]
    plain, cached = weince_loss(tiny), cached_weince(tiny)
    wanted = plain.compute_loss_from_embeddings(rows)
    with torch.autocast("cpu", dtype=dtype):
        assert plain.compute_loss_from_embeddings(rows) == wanted
        assert cached.calculate_loss([part.split(5) for part in rows]) == wanted


def test_inside_matryoshka(tiny):
    """Their wrapper for several widths works with the plain and the cached loss."""
    tiny.eval()
    tokens = features(tiny, 3)
    plain = step(tiny, MatryoshkaLoss(tiny, weince_loss(tiny, **OPEN), [16, 8]), tokens)
    cached = cached_weince(tiny, **OPEN, mini_batch_size=5)
    assert_same_step(step(tiny, MatryoshkaLoss(tiny, cached, [16, 8]), tokens), plain, **REPLAYED)
    widths = [weince_loss(tiny, **OPEN).compute_loss_from_embeddings(_cut(tiny, tokens, d)) for d in (16, 8)]
    torch.testing.assert_close(plain[0], sum(widths).detach())


def _cut(model, tokens, width):
    return [nn.functional.normalize(model(dict(part))["sentence_embedding"][:, :width]) for part in tokens]


def test_a_compiled_loss(tiny, fresh_compiler):
    """The core works under Dynamo with two batch sizes; tests of the core cover the rest of the compiler."""
    ours = weince_loss(tiny, **OPEN)
    ours.loss.compile(backend="eager", fullgraph=True)
    for rows in (12, 7):
        tokens = features(tiny, 3, rows)
        assert_same_step(
            step(tiny, ours, tokens), step(tiny, weince_loss(tiny, **OPEN), tokens), rtol=1e-9, atol=1e-11
        )


def test_labelled_sentences(tiny):
    tiny.eval()
    labels = torch.arange(12) % 4
    loss = LossAdapter(tiny, InfoNCELoss(0.05, candidates="labels"))
    tokens = features(tiny, 1)
    found, _ = step(tiny, loss, tokens, labels)
    rows = tiny(dict(tokens[0]))["sentence_embedding"]
    torch.testing.assert_close(found, InfoNCELoss(0.05, candidates="labels")(rows, labels=labels).detach())


@pytest.mark.parametrize("cached", [False, True])
def test_a_last_batch_of_one_row_counts_nothing_as_theirs(tiny, cached):
    loss = cached_weince(tiny) if cached else weince_loss(tiny)
    tokens = features(tiny, 2, rows=1)
    with pytest.warns(UserWarning, match="one row has nothing to contrast with.*dataloader_drop_last"):
        value, gradients = step(tiny, loss, tokens)
    assert value == step(tiny, MultipleNegativesRankingLoss(tiny), tokens)[0] == 0
    assert gradients
    assert all(gradient.abs().max() == 0 for gradient in gradients.values())


def test_a_batch_of_one_row_reaches_the_parameters_of_the_loss(tiny):
    """Their hooks average over devices: a hook that never runs would leave the other devices waiting."""
    temperature = nn.Parameter(torch.tensor(0.1))
    loss = LossAdapter(tiny, InfoNCELoss(temperature, candidates="cross"))
    with pytest.warns(UserWarning, match="one row has nothing to contrast with"):
        loss.compute_loss_from_embeddings([torch.randn(1, 8), torch.randn(1, 8)]).backward()
    assert temperature.grad == 0


def test_one_row_with_a_hard_negative_has_something_to_contrast(tiny):
    tokens = features(tiny, 3, rows=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = step(tiny, weince_loss(tiny, **CLOSED), tokens)
    assert_same_step(ours, step(tiny, MultipleNegativesRankingLoss(tiny), tokens), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("candidates", "columns", "message"),
    [
        (
            "cross",
            1,
            r'"cross" wants a dataset of 2 columns or more: query, positive, hard negatives; got 1$',
        ),
        ("clip", 1, r'"clip" wants a dataset of 2 columns or more: query, positive, hard negatives; got 1$'),
        ("views", 1, r'"views" wants a dataset of 2 columns: anchor, positive; got 1$'),
        (
            "labels",
            1,
            r'"labels" wants a dataset of 1 or 2 columns and integer labels; got 1 without labels$',
        ),
    ],
)
@pytest.mark.parametrize("adapter", [LossAdapter, CachedLossAdapter])
def test_wrong_number_of_columns(tiny, adapter, candidates, columns, message):
    with pytest.raises(ValueError, match=message):
        adapter(tiny, InfoNCELoss(candidates=candidates))(features(tiny, columns))


def test_a_loss_without_its_adapter_names_it(tiny):
    """The trainer gives a loss the tokens of each column."""
    said = "z_i must be a torch.Tensor; got list: give SentenceTransformerTrainer LossAdapter"
    with pytest.raises(TypeError, match=said):
        InfoNCELoss()(features(tiny, 2), None)


def test_bad_options(tiny):
    with pytest.raises(TypeError, match="model must be a SentenceTransformer; got str"):
        LossAdapter("all-MiniLM-L6-v2", InfoNCELoss())
    with pytest.raises(TypeError, match=r"loss must be a loss of weince.*; got CrossEntropyLoss"):
        LossAdapter(tiny, nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum"; got "none"'):
        LossAdapter(tiny, InfoNCELoss(reduction="none"))
    for size in (0, -1, 2.5, True, None):
        with pytest.raises(ValueError, match="mini_batch_size must be an int of at least 1; got"):
            cached_weince(tiny, mini_batch_size=size)
    with pytest.raises(ValueError, match="mini_batch_num_tokens must be an int of at least 1; got 0"):
        cached_weince(tiny, mini_batch_num_tokens=0)


@pytest.mark.parametrize("name", CASES)
def test_any_loss_is_adapted_and_its_configuration_is_json(tiny, name):
    case = CASES[name]
    loss = case.make(learned, candidates="views" if case.views_only else "cross")
    adapted = LossAdapter(tiny, loss)
    value, _ = step(tiny, adapted, features(tiny, 2, rows=5))
    assert value.isfinite()
    config = adapted.get_config_dict()
    assert json.loads(json.dumps(config)) == config
    assert config["loss"] == type(loss).__name__
    if isinstance(loss, weince.LinkLoss):
        assert "Link(" in config["link"]


def test_the_configuration_says_all_terms(tiny):
    released = weince.WeinceLoss.released(nn.Parameter(torch.tensor(0.25)), candidates="cross")
    for loss in (weince_loss(tiny), cached_weince(tiny), LossAdapter(tiny, released)):
        assert json.loads(json.dumps(loss.get_config_dict())) == loss.get_config_dict()
    config = LossAdapter(tiny, released).get_config_dict()
    assert (config["loss"], config["temperature"], config["tail"]["beta"]) == ("WeinceLoss", 0.25, 1.0)
    assert (config["softmax_term"], config["shortfall_term"], config["candidates"]) == (0.5, 0.5, "cross")
    assert weince_loss(tiny).get_config_dict()["gather_across_devices"] is False
    assert cached_weince(tiny, mini_batch_size=7).get_config_dict()["mini_batch_size"] == 7


def test_copies_and_states(tiny):
    loss = LossAdapter(tiny, weince.WeinceLoss.released(nn.Parameter(torch.tensor(0.05)), candidates="cross"))
    tokens = features(tiny, 2)
    step(tiny, loss, tokens)  # moves the running slope
    twin = copy.deepcopy(loss)
    assert twin.model is not tiny
    assert_same_step(step(twin.model, twin, tokens), step(tiny, loss, tokens), rtol=0, atol=0)
    fresh = LossAdapter(
        copy.deepcopy(tiny), weince.WeinceLoss.released(nn.Parameter(torch.tensor(0.5)), candidates="cross")
    )
    fresh.load_state_dict(loss.state_dict())
    assert_same_step(step(fresh.model, fresh, tokens), step(tiny, loss, tokens), rtol=0, atol=0)


def test_a_diagnosis_embeds_sentences_in_parts_and_tells_its_progress_in_lines(
    tiny_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(pair_files, "PART", 5)
    first, second = ([" ".join(WORDS[k : k + n]) for k in range(6)] for n in (2, 3))
    lines = "".join(f"{a}\t{b}\n" for a, b in zip(first, second, strict=True))
    (tmp_path / "pairs.tsv").write_text("query\tpositive\n" + lines)
    (found,) = pair_files.embed_pairs([str(tiny_folder)], tmp_path / "pairs.tsv")
    said = capsys.readouterr().err
    assert "embedding queries with encoder: 5 of 6" in said
    assert "Batches" not in said
    wanted = SentenceTransformer(str(tiny_folder), device="cpu").encode(
        first + second, show_progress_bar=False
    )
    np.testing.assert_allclose(np.concatenate([found.z_i, found.z_j]), wanted, atol=1e-6)
