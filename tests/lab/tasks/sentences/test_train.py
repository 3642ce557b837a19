"""Whole SimCSE runs: what they write, what they compute, and that they resume where they stopped."""

import json
import math
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import Program
from transformers import AutoModel, AutoTokenizer

from weince.lab import settings
from weince.lab.configure import LossConfig, build_loss
from weince.lab.tasks.registry import train
from weince.lab.tasks.sentences.config import TextRun
from weince.lab.tasks.sentences.encoder import SentenceEncoder, Tokens, load_backbone, tokenise
from weince.lab.tasks.sentences.sts import StsTask, evaluate_sts, read_sts
from weince.lab.tasks.sentences.task import finished
from weince.lab.tasks.sentences.training import SentenceTraining, fingerprint, tail_stats
from weince.lab.training import checkpoint, loop
from weince.lab.training.capture import Step
from weince.lab.training.fabric import launch
from weince.lab.training.log import read_log
from weince.lab.training.optimizers import set_rate
from weince.lab.training.processes import training_lock


def ready(run):
    """A run of these settings, ready to train in this process."""
    return SentenceTraining(run, launch(run))


def batch_of(training, words, ids=None):
    tokens = tokenise(training.tokenizer, words, 32)._asdict()
    return tokens if ids is None else {**tokens, "ids": torch.tensor(ids)}


def take(training, batch):
    """Train one step on a batch; returns the loss and the embeddings."""
    set_rate(training.optimizer, training.rate(0))
    loss, arguments = Step(training)(batch)
    return arguments["z_i"], arguments["z_j"], loss


@pytest.fixture
def run(toy_model, toy_text, toy_sts, tmp_path) -> TextRun:
    return TextRun(
        text=toy_text,
        model=str(toy_model),
        sts=toy_sts,
        out=tmp_path / "run",
        batch=16,
        eval_every=3,
        log_every=2,
        lr=1e-3,
        device="cpu",
    )


def test_an_encoder_without_a_correlation_is_never_the_best(run):
    training, looks = ready(run), iter([math.nan, 20.0, 10.0, math.nan])
    training.dev = SimpleNamespace(spearman=lambda _: next(looks))
    assert [training.judge(step) for step in range(1, 5)] == [{}, {"dev": 20.0}, {"dev": 10.0}, {}]
    assert (training.best, training.best_step) == (20.0, 2)


def test_a_run_whose_encoders_all_collapsed_ends_with_a_sentence_and_no_result(run, monkeypatch):
    monkeypatch.setattr(StsTask, "spearman", lambda *_: math.nan)
    with pytest.raises(ValueError, match=r"no encoder of this run can be chosen: each gives all pairs"):
        train(run, bar=False)
    assert not (run.out / "result.json").exists()
    assert not (run.out / "best").exists()
    assert "nan" not in (run.out / "log.csv").read_text().lower()


@pytest.mark.parametrize("preset", ["infonce", "paper", "released", "weibit"])
def test_a_run_writes_what_it_says(run, preset, capsys):
    from sentence_transformers import SentenceTransformer

    run = replace(run, loss=LossConfig(preset=preset, temperature=0.05))
    best = train(run, bar=preset == "paper")
    assert capsys.readouterr().out == ""  # stdout is for the result
    rows = read_log(run.out / "log.csv")
    assert [int(row["step"]) for row in rows] == [2, 3, 4, 6, 7]  # 100 sentences: 6 batches of 16, 1 of 4
    dev = {row["step"]: row["dev"] for row in rows if "dev" in row}
    assert sorted(dev) == [3, 6, 7]
    result = json.loads((run.out / "result.json").read_text())
    assert result["dev"] == pytest.approx(max(dev.values()), rel=1e-5)
    assert result["best_step"] == max(dev, key=dev.get)
    assert set(result["tasks"]) == {"STS12", "STSB"}
    # sentence-transformers and transformers both load the folder, and give the vectors that were scored.
    again = evaluate_sts(str(best), run.sts)
    assert again.tasks == pytest.approx(result["tasks"], abs=1e-4)
    words = ["the cat sees a bird", "a dog"]
    vectors = SentenceTransformer(str(best), device="cpu", local_files_only=True).encode(words)
    tokens = AutoTokenizer.from_pretrained(best)(words, return_tensors="pt", padding=True)
    with torch.no_grad():
        first = AutoModel.from_pretrained(best).eval()(**tokens).last_hidden_state[:, 0]
    np.testing.assert_allclose(vectors, first, atol=1e-6)


def test_one_step_is_simcse(run, toy_model):
    """Compare the loss and the weights after one step with SimCSE written by hand, both without dropout."""
    run = replace(run, head=True)
    training = ready(run)
    for layer in training.model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        if hasattr(layer, "dropout_prob"):
            layer.dropout_prob = 0.0
    words = ["the cat sees a bird", "a dog", "red sun", "the old river sings"]
    batch = batch_of(training, words)
    before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    training.model.backbone.config._attn_implementation = "eager"

    z = training.model.backbone(**batch).last_hidden_state[:, 0]
    z = torch.tanh(z @ before["head.0.weight"].T + before["head.0.bias"])
    cosines = F.normalize(z) @ F.normalize(z).T
    expected = F.cross_entropy(cosines / 0.05, torch.arange(4))
    grads = torch.autograd.grad(expected, list(training.model.backbone.parameters()), allow_unused=True)

    *_, loss = take(training, batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
    assert norm > 0
    for (name, value), grad in zip(training.model.backbone.named_parameters(), grads, strict=True):
        moved = (value - before[f"backbone.{name}"]).detach()
        if grad is None:
            assert not moved.any(), name
        else:  # AdamW's first step is lr times the sign of the gradient, unless that is tiny
            clear = grad.abs() > 1e-4
            torch.testing.assert_close(moved[clear], -run.lr * grad[clear].sign(), rtol=2e-3, atol=1e-7)


def test_dropout_makes_the_views_differ_and_evaluation_has_none(run):
    training = ready(run)
    batch = batch_of(training, ["the cat sees a bird", "a dog"])
    [view] = training.views(batch)
    z_i, z_j = view.encoder(view.inputs).chunk(2)
    assert (z_i - z_j).abs().max() > 1e-3
    assert z_i.abs().max() <= 1  # the head ends in tanh
    training.model.eval()
    z_i, z_j = view.encoder(view.inputs).chunk(2)
    torch.testing.assert_close(z_i, z_j)
    assert z_i.abs().max() > 1  # evaluation leaves out the head


def test_equal_sentences_are_not_negatives(run):
    training = ready(run)
    training.model.backbone.eval()  # no dropout
    batch = batch_of(training, ["a dog", "the cat", "a dog", "red sun"], [7, 8, 7, 9])
    with torch.no_grad():
        z = training.model(Tokens(batch["input_ids"], batch["attention_mask"]))
    cosines = F.normalize(z) @ F.normalize(z).T / 0.05
    cosines[0, 2] = cosines[2, 0] = -torch.inf
    expected = F.cross_entropy(cosines, torch.arange(4))
    *_, loss = take(training, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["infonce", "paper", "released"])
@pytest.mark.parametrize("ids", [None, [0, 1, 2, 3, 4, 0, 6, 7]])
def test_logged_statistics_are_those_of_the_loss(preset, ids):
    loss = build_loss(LossConfig(preset=preset, temperature=0.05), candidates="cross").eval()
    z_i, z_j = torch.randn(8, 5), torch.randn(8, 5)
    ids = None if ids is None else torch.tensor(ids)
    expected = loss(z_i, z_j, ids=ids, return_stats=True)
    found = tail_stats(loss, {"z_i": z_i, "z_j": z_j, "ids": ids})
    for ours, theirs in zip(found, expected.stats, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_computes_the_same(run, tmp_path):
    """Losses agree with and without a graph; the smaller last batch runs outside it. Dropout is off: masks differ."""
    # At lr 1e-3 training would amplify rounding of 1e-6 to 1e-3; at 3e-4 it stays below 1e-5, while batches
    # differ by more than 1e-3.
    loss = LossConfig(preset="infonce", temperature=0.05)
    run = replace(run, loss=loss, device="cuda", epochs=3, max_length=16, lr=3e-4)
    model = tmp_path / "model"
    shutil.copytree(run.model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    losses = []
    for graph in (False, True):
        out = tmp_path / str(graph)
        train(replace(run, model=str(model), out=out, graph=graph))
        losses.append([row["loss"] for row in read_log(out / "log.csv")])
    assert len(losses[0]) > 5
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_what_a_loss_learns_is_trained_and_logged(run):
    """Also after a restart from a log without these columns, as older versions wrote it."""
    run, older = (replace(run, loss=LossConfig("siglip"), out=run.out / name) for name in ("run", "older"))
    train(run)
    rows, found = read_log(run.out / "log.csv"), checkpoint.newest(run.out / "checkpoints").state["loss"]
    start, names = build_loss(run.loss).state_dict(), ("log_scale", "bias")
    assert all(abs(float(found[name] - start[name])) > 1e-4 for name in names)
    wanted = pytest.approx([float(found[name]) for name in names], rel=1e-5)
    assert [rows[-1][f"learned_{name}"] for name in names] == wanted
    shutil.copytree(run.out, older.out, ignore=shutil.ignore_patterns("result.json"))
    (older.out / "run.yaml").write_text(settings.dump(older))
    checkpoints = older.out / "checkpoints"
    max(checkpoints.iterdir()).unlink()
    step = checkpoint.newest(checkpoints).step
    lines = [line.rsplit(",", 2)[0] for line in (older.out / "log.csv").read_text().splitlines()]
    (older.out / "log.csv").write_text("\n".join(lines) + "\n")
    train(older)
    for now, before in zip(read_log(older.out / "log.csv"), rows, strict=True):
        for name in names:
            assert now.get(f"learned_{name}") == (
                before[f"learned_{name}"] if before["step"] > step else None
            )


def test_learning_rate_falls_linearly(run):
    training = ready(run)
    np.testing.assert_allclose([training.rate(step) for step in range(7)], run.lr * (1 - np.arange(7) / 7))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_precisions_train_and_vectors_stay_float32(run, precision):
    before = torch.get_float32_matmul_precision()
    training = ready(replace(run, precision=precision))
    seen = []
    training.loss.register_forward_pre_hook(lambda _, args: seen.extend(z.dtype for z in args))
    z_i, z_j, loss = take(training, training.prepare(np.arange(16)))
    assert seen == [z_i.dtype, z_j.dtype] == [torch.float32, torch.float32]
    assert loss.isfinite()
    train(replace(run, precision=precision))
    assert torch.get_float32_matmul_precision() == before


def _weights(out):
    return checkpoint.newest(out / "checkpoints").state["model"]


def _lines(out):
    return [
        {key: row[key] for key in row if key not in ("sentences_per_second", "seconds")}
        for row in read_log(out / "log.csv")
    ]


def test_a_run_cut_anywhere_ends_the_same(run, monkeypatch):
    """Cut in a step, while saving or before an evaluation, and started again, a run ends bit for bit the same."""
    run = replace(run, loss=LossConfig(preset="released", temperature=0.05), epochs=2)
    train(run)

    class Cut(Exception):
        pass

    for place, (owner, name, count) in enumerate(
        [(Step, "_take", 5), (checkpoint, "save", 2), (SentenceTraining, "judge", 3)]
    ):
        cut = replace(run, out=run.out.parent / f"cut{place}")
        whole, calls = getattr(owner, name), []

        def cutting(*args, whole=whole, calls=calls, count=count, **options):
            calls.append(1)
            if len(calls) == count:
                raise Cut
            return whole(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cutting)
            with pytest.raises(Cut):
                train(cut)
        train(cut)
        assert _lines(cut.out) == _lines(run.out)
        assert all(
            torch.equal(a, b)
            for a, b in zip(_weights(cut.out).values(), _weights(run.out).values(), strict=True)
        )
        ours, theirs = (json.loads((out / "result.json").read_text()) for out in (cut.out, run.out))
        assert ours == theirs


def test_a_killed_process_goes_on(run, tmp_path):
    """Kill the process with SIGKILL, then make the same call again."""
    whole = replace(run, epochs=6, out=tmp_path / "whole")
    killed = replace(whole, out=tmp_path / "killed")
    config = tmp_path / "run.yaml"
    config.write_text(settings.dump(killed))
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from weince.lab import settings; from weince.lab.tasks.registry import train\n"
        "from weince.lab.tasks.sentences.config import TextRun\n"
        f"train(settings.read(TextRun, ['--config', {str(config)!r}], command='', examples=''), bar=False)"
    )
    process = Program("-c", code)
    deadline = time.monotonic() + 60
    while not list((killed.out / "checkpoints").glob("*.pt")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (killed.out / "result.json").exists()
    train(killed, bar=False)
    train(whole, bar=False)
    assert _lines(killed.out) == _lines(whole.out)
    assert all(
        torch.equal(a, b)
        for a, b in zip(_weights(killed.out).values(), _weights(whole.out).values(), strict=True)
    )


def test_checkpoints_of_another_version_are_refused_with_a_sentence(run):
    """The state of the version before: other names, and states of generators that this one does not need."""
    train(run)
    (run.out / "result.json").unlink()
    folder = run.out / "checkpoints"
    newest = checkpoint.newest(folder)
    before = {"encoder": newest.state["model"], "best": 1.0, "best_step": 3, "rng": torch.get_rng_state()}
    for path in folder.iterdir():
        path.unlink()
    checkpoint.save(folder, newest.step, before)
    files = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"do not fit this run \(ValueError: another version .*choose another"
    ):
        train(run)
    assert {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()} == files


def test_a_run_that_another_process_trains_is_left_alone(run):
    with training_lock(run.out):
        with pytest.raises(ValueError, match=r"run: another process trains this run; wait for it, or choose"):
            train(run)
        assert [path.name for path in run.out.iterdir()] == [".train.lock"]
    assert train(run).is_dir()


def test_a_finished_run_is_left_alone_and_another_is_refused(run, monkeypatch):
    best = train(run)
    monkeypatch.setattr(SentenceTraining, "__init__", None)
    assert train(run) == best
    with pytest.raises(ValueError, match=r"holds another run \(seed 0 -> 1\)"):
        train(replace(run, seed=1))


@pytest.mark.parametrize("content", ["half", "[]"])
def test_a_damaged_result_is_named(run, content):
    run.out.mkdir()
    (run.out / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result\.json is damaged \(.*: remove it to"):
        finished(run)


def test_seeds_differ_and_repeat(run, tmp_path):
    logs = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(run, out=tmp_path / out, seed=seed))
        logs.append(_lines(tmp_path / out))
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_training_helps_on_the_toy(run):
    """Training raises the dev score and lowers the loss, with dropout as the only augmentation."""
    backbone, tokenizer = load_backbone(run.model)
    before = StsTask(tokenizer, read_sts(run.sts)["STSB", "dev"]).spearman(SentenceEncoder(backbone))
    train(replace(run, epochs=4))
    rows = read_log(run.out / "log.csv")
    assert json.loads((run.out / "result.json").read_text())["dev"] > before
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 1}, "batch must be at least 2; got 1"),
        ({"max_length": 2}, "max_length must be at least 3"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"max_length": 2**31}, r"max_length must be below 2\*\*31; got 2147483648"),
        ({"epochs": 2**31}, r"epochs must be below 2\*\*31; got 2147483648"),
        ({"lr": math.nan}, "lr must be above 0"),
        ({"lr": 1e38}, r"lr must be above 0 and at most 1e\+30; got 1e\+38"),
        ({"sentences": 1}, "sentences must be at least 2"),
        ({"precision": "fp16"}, "precision must be fp32, tf32 or bf16; got 'fp16'"),
    ],
)
def test_settings_that_make_no_sense(run, change, message):
    with pytest.raises(ValueError, match=message):
        replace(run, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "no.txt"}, "no such text file"),
        ({"sts": "no.tsv"}, "no such STS file"),
        ({"model": "./no-model"}, "no such model folder: ./no-model"),
    ],
)
def test_missing_files(run, tmp_path, change, message):
    change = {name: value if name == "model" else tmp_path / value for name, value in change.items()}
    with pytest.raises(OSError, match=message) as caught:
        train(replace(run, **change))
    assert "\n" not in str(caught.value)
    assert not run.out.exists()


def test_a_run_that_diverges_says_what_to_do(run):
    with pytest.raises(ValueError, match=r"the loss is nan at step \d: set a lower lr, or"):
        train(replace(run, lr=1e30), bar=False)


def test_a_step_that_ruins_the_weights_writes_neither_checkpoint_nor_encoder(run, monkeypatch):
    monkeypatch.setattr(loop, "set_rate", lambda optimizer, _: set_rate(optimizer, math.nan))
    with pytest.raises(ValueError, match=r"the weights are not finite after step 1: set a lower lr, or"):
        train(replace(run, eval_every=1), bar=False)
    assert not (run.out / "checkpoints").exists()
    assert not (run.out / "best").exists()


def test_no_dev_split(run, tmp_path):
    sts = tmp_path / "sts.tsv"
    sts.write_text("\n".join(line for line in run.sts.read_text().splitlines() if "\tdev\t" not in line))
    with pytest.raises(ValueError, match="no dev split of STSB"):
        train(replace(run, sts=sts))


def test_a_loss_that_cannot_run_here_leaves_no_folder(run):
    with pytest.raises(ValueError, match=r"the loss fails on random embeddings \(16, 32\): .* got cpu"):
        train(replace(run, loss=LossConfig("infonce", engine="fused")), bar=False)
    assert not run.out.exists()


def test_a_loss_that_takes_no_ids_is_refused_and_leaves_no_folder(run, tmp_path, monkeypatch):
    (tmp_path / "loss_without_ids.py").write_text("""
import torch
class Plain(torch.nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean()
""")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"the loss fails on .*TypeError: .* unexpected keyword argument 'ids'"
    ):
        train(replace(run, loss=LossConfig("loss_without_ids:Plain")), bar=False)
    assert not run.out.exists()


def test_a_device_that_is_not_there(run):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="no CUDA device"):
        train(replace(run, device="cuda"))
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or mps; got 'tpu'"):
        train(replace(run, device="tpu"))
    with pytest.raises(ValueError, match="a CUDA graph needs a CUDA device; got cpu"):
        train(replace(run, graph=True))


def test_ugly_text_trains(run, tmp_path):
    """Empty lines, a line of 10,000 words, duplicates and other scripts give warnings, but the run trains."""
    text = tmp_path / "ugly.txt"
    text.write_text(
        "a dog\n\n" * 9 + "cat " * 10_000 + "\n日本語 sun\n \t\n" + "\x00\x01\n", encoding="utf-8"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(replace(run, text=text, batch=8))
    said = " ".join(str(item.message) for item in caught)
    assert "left out 10 empty lines" in said
    assert "8 of 12 sentences repeat" in said
    assert all(math.isfinite(row["loss"]) for row in read_log(run.out / "log.csv"))


@pytest.mark.parametrize("preset", ["infonce", "paper", "released"])
def test_configurations_that_come_with_the_package(preset):
    line = f"--config simcse_{preset} --text a.txt --model m --sts b.tsv --seed 3 --loss.temperature 0.1"
    read = settings.read(TextRun, line.split(), command="weince train", examples="")
    assert read == TextRun(
        text=Path("a.txt"),
        model="m",
        sts=Path("b.tsv"),
        out=Path(f"runs/simcse_{preset}"),
        loss=LossConfig(preset=preset, temperature=0.1),
        seed=3,
    )
    assert settings.load(f"simcse_{preset}")["loss"]["temperature"] == 0.05


def test_settings_survive_the_command_line(run, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(settings.dump(run))
    line = ["--config", str(config), "--loss.temperature", "0.1", "--seed", "3"]
    read = settings.read(TextRun, line, command="weince train", examples="")
    assert read == replace(run, loss=replace(run.loss, temperature=0.1), seed=3)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [6, 7]), (2, [6, 7]), (3, [7])])
def test_checkpoints_are_taken_as_often_as_asked(run, every, steps):
    """However rare the checkpoints, the best encoder is on disk, and it has the scores in the log."""
    best = train(replace(run, checkpoint_every=every))
    kept = sorted(int(path.stem.removeprefix("step_")) for path in (run.out / "checkpoints").glob("*.pt"))
    assert kept == steps
    stsb = json.loads((run.out / "result.json").read_text())["tasks"]["STSB"]
    assert evaluate_sts(str(best), run.sts).tasks["STSB"] == pytest.approx(stsb, abs=1e-4)
    rows = [row["dev"] for row in read_log(run.out / "log.csv") if "dev" in row]
    backbone, tokenizer = load_backbone(str(best))
    dev = StsTask(tokenizer, read_sts(run.sts)["STSB", "dev"]).spearman(SentenceEncoder(backbone))
    assert dev == pytest.approx(max(rows), rel=1e-5)


def test_the_bar_is_not_in_the_way_of_the_result(run, capsys):
    train(replace(run, out=run.out / "[v2] bert"), bar=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[v2] bert" in shown.err


@pytest.fixture
def paired(run, tmp_path):
    """A run on pairs: each sentence with its words reversed."""
    lines = run.text.read_text(encoding="utf-8").splitlines()
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{line}\t{' '.join(reversed(line.split()))}\n" for line in lines))
    return replace(run, text=pairs, pairs=True, pooling="mean", head=False)


def test_one_step_on_pairs_contrasts_the_means_of_their_tokens(paired):
    """Compare the loss with a loop that embeds each sentence alone, without padding."""
    training = ready(paired)
    training.model.eval()
    batch, drawn = training.prepare(np.arange(5)), training.sentences.draw(np.arange(5))
    with torch.no_grad():
        rows = []
        for sentence in drawn.sentences:
            alone = tokenise(training.tokenizer, [sentence], 32)
            rows.append(training.model.backbone(**alone._asdict()).last_hidden_state[0].double().mean(0))
        rows = F.normalize(torch.stack(rows), dim=1)
        expected = F.cross_entropy(rows[:5] @ rows[5:].T / 0.05, torch.arange(5))
    assert "ids" not in batch
    z_i, z_j, loss = take(training, batch)
    assert z_i.shape == z_j.shape == (5, 32)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_run_on_pairs_ends_with_an_encoder_that_takes_means(paired):
    from sentence_transformers import SentenceTransformer

    best = train(paired, bar=False)
    result = json.loads((paired.out / "result.json").read_text())
    again = evaluate_sts(str(best), paired.sts)  # pools as the folder configures
    assert again.tasks == pytest.approx(result["tasks"], abs=1e-4)
    words = ["the cat sees a bird", "a dog"]
    vectors = SentenceTransformer(str(best), device="cpu", local_files_only=True).encode(words)
    backbone, tokenizer = load_backbone(str(best))
    with torch.no_grad():
        wanted = SentenceEncoder(backbone, pooling="mean").eval()(tokenise(tokenizer, words, 32))
        other = SentenceEncoder(backbone).eval()(tokenise(tokenizer, words, 32))
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    assert np.abs(vectors - other.numpy()).max() > 1e-3


def test_what_a_run_starts_from_has_a_fingerprint(run, paired, tmp_path):
    train(run, bar=False)
    found = json.loads((run.out / "result.json").read_text())
    assert found["fingerprint"] == fingerprint(run) == fingerprint(replace(run, seed=5, lr=0.1))
    assert found["data"] == "sentences.txt, sts.tsv, model"
    other = tmp_path / "other.tsv"
    other.write_text(run.sts.read_text() + "STSB\tx\ttest\t1.0\ta\tb\n")
    changed = [
        replace(run, sentences=50),
        paired,
        replace(run, sts=other),
        replace(run, model=str(run.out / "best")),
    ]
    assert len({fingerprint(one) for one in (run, *changed)}) == 5


@pytest.mark.parametrize("finished", [True, False])
def test_other_sentences_or_another_encoder_do_not_go_on(run, tmp_path, finished, monkeypatch):
    judge = SentenceTraining.judge

    def interrupted(training, step):
        if step == 6:
            raise KeyboardInterrupt
        return judge(training, step)

    if finished:
        train(run)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(SentenceTraining, "judge", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(run)
    assert (run.out / "result.json").is_file() == finished
    other = tmp_path / "other.txt"
    other.write_text("\n".join(reversed(run.text.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match=r"began with .* of fingerprint \w+; got \w+: choose another --out"):
        train(replace(run, text=other))
    moved = tmp_path / "moved.txt"
    shutil.copy(run.text, moved)
    train(replace(run, text=moved))
    assert (run.out / "result.json").is_file()
