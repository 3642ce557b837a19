"""Options for texts: hard negatives, equal texts, weights, positives, limits, a learned temperature."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_text import REPLAYED
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer.losses import (
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import dot_score
from test_sentence_transformers import assert_same_step, step
from torch import nn
from toy_text import column, features

from weince import InfoNCELoss, SigLIPLoss, WeinceLoss
from weince.integrations.equal_texts import pair_ids, text_keys
from weince.integrations.sentence_transformers import CachedLossAdapter, LossAdapter

EXACT = {"rtol": 1e-9, "atol": 1e-10}
BOTH_WAYS = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
TWINS = {
    "both directions": (BOTH_WAYS, {"candidates": "clip"}, (2, 3, 5)),
    "queries among queries": ({"directions": ("query_to_doc", "query_to_query")}, {"within": True}, (2, 4)),
    "hardness": ({"hardness_mode": "all_negatives", "hardness_strength": 7.0}, {"hardness": 7.0}, (2, 4)),
    "hardness of pairs": (
        {"hardness_mode": "in_batch_negatives", "hardness_strength": 7.0},
        {"hardness": 7.0},
        (2,),
    ),
    "products": ({"similarity_fct": dot_score}, {"score": "dot"}, (2, 4)),
}


def adapters(model, loss, **options):
    """The plain adapter and the cached one."""
    return LossAdapter(model, loss, **options), CachedLossAdapter(model, loss, mini_batch_size=5, **options)


@pytest.mark.parametrize("name", TWINS)
def test_their_options_by_our_names(tiny, name):
    theirs, options, numbers = TWINS[name]
    tiny.eval()
    for columns in numbers:
        tokens = features(tiny, columns)
        wanted = step(tiny, MultipleNegativesRankingLoss(tiny, scale=5.0, **theirs), tokens)
        ours = adapters(tiny, InfoNCELoss(0.2, **{"candidates": "cross", **options}))
        assert_same_step(step(tiny, ours[0], tokens), wanted, **EXACT)
        assert_same_step(step(tiny, ours[1], tokens), wanted, **REPLAYED)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("theirs", "limit"),
    [
        ({"margin": 0.0}, 0.0),
        ({"margin": 0.01}, -0.01),
        ({"margin": -0.01}, 0.01),
        ({"margin_strategy": "relative", "margin": 0.02}, lambda s: s - 0.02 * s.abs()),
    ],
)
def test_a_limit_above_the_positive_is_their_margin_with_the_model_as_guide(tiny, theirs, limit, within):
    tiny.eval()
    guide = SentenceTransformer(modules=list(tiny), device="cpu").eval()
    for columns in (2, 3):
        tokens = features(tiny, columns)
        options = {"contrast_anchors": within, "contrast_positives": False, **theirs}
        wanted = step(tiny, GISTEmbedLoss(tiny, guide, temperature=0.2, **options), tokens)
        core = InfoNCELoss(0.2, candidates="cross", within=within, ignore_above=limit, exempt_hard=False)
        ours = step(tiny, LossAdapter(tiny, core), tokens)
        assert_same_step(ours, wanted, **EXACT)
        plain = step(tiny, LossAdapter(tiny, InfoNCELoss(0.2, candidates="cross", within=within)), tokens)
        assert abs(float(plain[0] - wanted[0])) > 1e-3  # the limit leaves some out
        exempt = InfoNCELoss(0.2, candidates="cross", within=within, ignore_above=limit)
        assert (step(tiny, LossAdapter(tiny, exempt), tokens)[0] == ours[0]) == (columns == 2)


TEXTS = [
    ["a cat", "a dog", "a bird", "the sun", "a cat", "a tree", "she sings", "the river"],
    ["he eats", "it runs", "the house", "it runs", "the fish", "on the tree", "a dog", "to a bird"],
    ["the fish", "in the sun", "he eats", "and", "a cat", "the house", "on", "runs"],
    ["he sings", "it runs", "of", "the", "see", "see", "a bird", "in"],
]


def groups(pairs):
    """Smallest pair to which shared texts link each pair, and the group of each text."""
    of_pair = list(range(len(pairs)))
    for _ in pairs:
        for i, left in enumerate(pairs):
            for j, right in enumerate(pairs):
                if set(left) & set(right):
                    of_pair[i] = of_pair[j] = min(of_pair[i], of_pair[j])
    return of_pair, {text: of_pair[i] for i, pair in enumerate(pairs) for text in pair}


def by_hand(texts, rows, *, own, clip=False, mask=True, scale=5.0):
    """The loss of each anchor from a loop over its negatives, which are compared as strings."""
    of_pair, of_text = groups(list(zip(*texts[:2], strict=True)))
    n, unit = len(texts[0]), [nn.functional.normalize(part) for part in rows]

    def loss(i, anchors, others, further):
        logits = [anchors[i] @ others[i]]
        logits += [
            anchors[i] @ others[j] for j in range(n) if j != i and not (mask and of_pair[j] == of_pair[i])
        ]
        for part, sentences in further:
            for j, text in enumerate(sentences):
                if (not own or j == i) and not (mask and of_text.get(text) == of_pair[i]):
                    logits.append(anchors[i] @ part[j])
        return -(scale * torch.stack(logits)).log_softmax(0)[0]

    hard = list(zip(unit[2:], texts[2:], strict=True))
    losses = [loss(i, unit[0], unit[1], hard) for i in range(n)]
    return torch.stack(losses + [loss(i, unit[1], unit[0], []) for i in range(n) if clip])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("candidates", ["cross", "clip"])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_hard_negatives_and_equal_texts(tiny, own, candidates, mask, columns):
    tiny.eval()
    texts = TEXTS[:columns]

    def loop(tokens, labels):
        rows = [tiny(dict(part))["sentence_embedding"] for part in tokens]
        return by_hand(texts, rows, own=own, clip=candidates == "clip", mask=mask).mean()

    wanted = step(tiny, loop, [tiny.preprocess(part) for part in texts])
    options = {"hard_negatives": "own" if own else "shared", "mask_duplicates": mask}
    for ours, allowed in zip(
        adapters(tiny, InfoNCELoss(0.2, candidates=candidates), **options), (EXACT, REPLAYED), strict=True
    ):
        assert_same_step(step(tiny, ours, [tiny.preprocess(part) for part in texts]), wanted, **allowed)
    other = step(
        tiny,
        LossAdapter(tiny, ours.loss, **{**options, "mask_duplicates": not mask}),
        loop_tokens(tiny, texts),
    )
    assert abs(float(other[0] - wanted[0])) > 1e-3


def loop_tokens(model, texts):
    return [model.preprocess(part) for part in texts]


def test_two_views_with_equal_texts(tiny):
    tiny.eval()
    tokens = loop_tokens(tiny, TEXTS[:2])
    rows = [tiny(dict(part))["sentence_embedding"] for part in tokens]
    ids = torch.tensor(groups(list(zip(*TEXTS[:2], strict=True)))[0])
    wanted = InfoNCELoss(0.2)(*rows, ids=ids).detach()
    torch.testing.assert_close(step(tiny, LossAdapter(tiny, InfoNCELoss(0.2)), tokens)[0], wanted)


@settings(max_examples=80)
@given(data=st.data())
def test_texts_are_equal_if_their_tokens_are(data):
    """In any padding, and one after the other. Token 0 counts at the end of a text, too."""
    texts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12))
    longest = max(map(len, texts)) + data.draw(st.integers(0, 3))
    left, right = (torch.zeros(2, len(texts), longest, dtype=torch.int64) for _ in range(2))
    for row, text in enumerate(texts):
        right[:, row, : len(text)] = torch.stack([torch.tensor(text), torch.ones(len(text)).long()])
        left[:, row, longest - len(text) :] = right[:, row, : len(text)]
    flat, ends = (
        torch.tensor([token for text in texts for token in text]),
        torch.tensor([0, *map(len, texts)]).cumsum(0),
    )
    every = [text_keys({"input_ids": ids, "attention_mask": mask}) for ids, mask in (left, right)]
    every.append(text_keys({"input_ids": flat, "offsets": ends[:-1]}))
    every.append(text_keys({"input_ids": flat.unsqueeze(0), "cu_seq_lens_q": ends.int()}))
    for keys in every:
        assert torch.equal(keys, every[0])
    assert [[a == b for a in texts] for b in texts] == (keys[:, None] == keys).tolist()


@settings(max_examples=80)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    seed=st.integers(0, 9),
)
def test_ids_join_pairs_that_share_a_text(pairs, seed):
    hard = np.random.default_rng(seed).integers(0, 12, (len(pairs), 2))
    columns = [
        {"input_ids": torch.tensor([[text] for text in part])}
        for part in (*zip(*pairs, strict=True), *hard.T)
    ]
    of_pair, of_text = groups(pairs)
    for by_row, texts in ((True, hard.flatten()), (False, hard.T.flatten())):
        wanted = [*of_pair, *(of_text.get(int(text), 100 + int(text)) for text in texts)]
        ids = pair_ids(columns, False, by_row=by_row)
        if ids is None:
            assert len(set(wanted)) == len(wanted)
        else:
            assert ((ids[:, None] == ids).numpy() == (np.array(wanted)[:, None] == np.array(wanted))).all()


def test_only_texts_are_compared():
    """An image has the tokens of every image. Captions of one picture then still have their own ids."""
    image = {"input_ids": torch.ones(3, 4).long(), "pixel_values": torch.randn(3, 2)}
    text = {"input_ids": torch.tensor([[1], [2], [1]]), "modality": "text"}
    assert text_keys(image) is None
    assert text_keys({**text, "modality": "message"}) is None
    assert text_keys({"sentence_embedding": torch.randn(3, 2)}) is None
    assert pair_ids([image, image], False, by_row=True) is None
    for columns in ([image, text], [text, image], [text, text, image]):
        ids = pair_ids(columns, False, by_row=True)
        assert ids.shape == (3,)
        assert (ids[:, None] == ids).tolist() == [
            [True, False, True],
            [False, True, False],
            [True, False, True],
        ]


@pytest.mark.parametrize("whole", [False, True])
def test_weights_of_rows(tiny, whole):
    tiny.eval()
    weights = torch.tensor([1, 0, 2, 3, 1, 5, 1, 1]) if whole else torch.tensor([1, 0, 2, 0.3, 1, 5, 1, 1])

    def loop(tokens, labels):
        rows = [tiny(dict(part))["sentence_embedding"] for part in tokens]
        return (by_hand(TEXTS[:3], rows, own=False) * weights).sum() / weights.double().sum()

    wanted = step(tiny, loop, loop_tokens(tiny, TEXTS[:3]))
    for ours, allowed in zip(
        adapters(tiny, InfoNCELoss(0.2, candidates="cross"), label_column="weights"),
        (EXACT, REPLAYED),
        strict=True,
    ):
        assert_same_step(step(tiny, ours, loop_tokens(tiny, TEXTS[:3]), weights), wanted, **allowed)
    ignored = LossAdapter(tiny, InfoNCELoss(0.2, candidates="cross"))
    assert (
        step(tiny, ignored, loop_tokens(tiny, TEXTS), weights)[0]
        == step(tiny, ignored, loop_tokens(tiny, TEXTS))[0]
    )


@pytest.mark.parametrize("candidates", ["cross", "clip"])
def test_several_positives_by_a_label(tiny, candidates):
    tiny.eval()
    tokens, labels = features(tiny, 4), torch.arange(12) % 5
    core = InfoNCELoss(0.2, candidates=candidates)

    def direct(tokens, labels):
        rows = [tiny(dict(part))["sentence_embedding"] for part in tokens]
        return core(*rows[:2], labels=(labels, labels), negatives=torch.stack(rows[2:], 1))

    options = {"hard_negatives": "own", "label_column": "positives"}
    wanted = step(tiny, direct, tokens, labels)
    for ours, allowed in zip(adapters(tiny, core, **options), (EXACT, REPLAYED), strict=True):
        assert_same_step(step(tiny, ours, tokens, labels), wanted, **allowed)


LEARNING = {
    "a parameter": lambda: InfoNCELoss(nn.Parameter(torch.tensor(0.2)), max_scale=100, candidates="cross"),
    "log(1/t)": lambda: InfoNCELoss(0.2, learn_temperature=True, candidates="clip"),
    "beyond its bound": lambda: InfoNCELoss(0.005, learn_temperature=True, candidates="cross"),
    "scale and bias": lambda: SigLIPLoss(candidates="cross"),
    "WEINCE": lambda: WeinceLoss(nn.Parameter(torch.tensor(0.2)), candidates="cross"),
}


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def slopes(loss):
    return {name: None if each.grad is None else each.grad.clone() for name, each in loss.named_parameters()}


@pytest.mark.parametrize("name", LEARNING)
def test_the_cached_loss_learns_its_temperature(tiny, name):
    """Gradients add up over two batches that are halved, as gradient accumulation does."""
    found = []
    without_dropout(tiny)
    for make in (LossAdapter, lambda *each: CachedLossAdapter(*each, mini_batch_size=5)):
        tiny.zero_grad()
        adapter = make(tiny, LEARNING[name]())
        for tokens in (features(tiny, 3), features(tiny, 3, rows=7)):
            (adapter(tokens) / 2).backward()
        found.append(slopes(adapter))
    assert found[0].keys() == found[1].keys()
    assert any(
        each is not None and each.any() for key, each in found[0].items() if key.startswith("loss.")
    ), found[0].keys()
    for key, wanted in found[0].items():
        if wanted is not None:
            torch.testing.assert_close(
                found[1][key], wanted, **REPLAYED, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_a_learned_temperature_inside_matryoshka(tiny):
    tiny.eval()
    found = []
    for cached in (False, True):
        adapter = adapters(tiny, InfoNCELoss(0.2, learn_temperature=True, candidates="cross"))[cached]
        MatryoshkaLoss(tiny, adapter, [16, 8])(features(tiny, 3), None).backward()
        found.append(adapter.loss.log_scale.grad)
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0])


def test_the_trainer_learns_the_same_temperature_cached_and_plain(tiny_folder, tmp_path):
    """With a column of weights, own hard negatives and accumulated batches."""
    pairs = Dataset.from_dict(
        {
            name: column(32, seed)
            for seed, name in enumerate(("query", "positive", "negative_1", "negative_2"))
        }
        | {"score": [0.5 + i / 32 for i in range(32)]}
    )
    learned = []
    for cached in (False, True):
        model = SentenceTransformer(str(tiny_folder), device="cpu").double()
        without_dropout(model)
        core = InfoNCELoss(0.2, learn_temperature=True, candidates="clip")
        loss = adapters(model, core, hard_negatives="own", label_column="weights")[cached]
        arguments = Arguments(
            str(tmp_path / str(cached)),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            max_steps=3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            seed=1,
        )
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
        learned.append(float(core.log_scale.detach()))
    assert abs(learned[0] + math.log(0.2)) > 1e-3
    assert learned[1] == pytest.approx(learned[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "candidates", "message"),
    [
        ({"hard_negatives": "mine"}, "cross", "hard_negatives must be one of shared, own; got 'mine'"),
        ({"label_column": "ids"}, "cross", "label_column must be one of weights, positives; got 'ids'"),
        (
            {"label_column": "positives"},
            "views",
            'label_column="positives" goes with candidates cross, clip; got views',
        ),
        (
            {"label_column": "weights"},
            "labels",
            'label_column="weights" goes with candidates cross, clip, views; got labels',
        ),
        ({"mask_duplicates": None}, "cross", "mask_duplicates must be True or False; got None"),
    ],
)
@pytest.mark.parametrize("adapter", [LossAdapter, CachedLossAdapter])
def test_wrong_options(tiny, adapter, options, candidates, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        adapter(tiny, InfoNCELoss(candidates=candidates), **options)


@pytest.mark.parametrize("adapter", [LossAdapter, CachedLossAdapter])
def test_a_missing_label_column(tiny, adapter):
    loss = adapter(tiny, InfoNCELoss(candidates="cross"), label_column="weights")
    with pytest.raises(
        ValueError, match='label_column="weights" wants a column label, labels, score or scores'
    ):
        loss(features(tiny, 2))


def test_the_card_says_the_options(tiny):
    loss = LossAdapter(tiny, InfoNCELoss(0.2, candidates="cross", ignore_above=0.1), hard_negatives="own")
    config = loss.get_config_dict()
    assert (config["hard_negatives"], config["label_column"], config["mask_duplicates"]) == (
        "own",
        None,
        True,
    )
    assert config["ignore_above"] == 0.1
