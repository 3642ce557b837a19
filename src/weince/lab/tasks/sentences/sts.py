"""Semantic textual similarity: how well cosines of sentence vectors rank pairs as people do.

Each task gives one Spearman correlation (x 100) over all pairs of its test split, with its subsets concatenated:
SimCSE's "all" setting. From a terminal: ``weince evaluate MODEL --sts sts.tsv``.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weince.files import check_file
from weince.lab.geometry import pair_distances, uniformity, unit_in_double
from weince.lab.tasks.sentences.encoder import SentenceEncoder, Tokens, check_model, load_backbone, tokenise
from weince.machine import prepare_cpu_for

TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSB", "SICK-R")
COLUMNS = ("task", "subset", "split", "score")
"""The first columns; two sentences follow, whose columns may have any name."""

LONGEST = 128
"""Word pieces of a sentence to use in evaluation, unless the model's folder says otherwise."""

Embed = Callable[[Sequence[str]], Tensor]


class StsPairs(NamedTuple):
    """Pairs of sentences with the similarity that people gave them (0 to 5)."""

    first: list[str]
    second: list[str]
    scores: NDArray[np.float64]


Sts = Mapping[tuple[str, str], StsPairs]
"""Pairs by task and split, for example ``("STSB", "dev")``."""


class StsScores(NamedTuple):
    """Scores of an encoder.

    Args:
        tasks: Spearman x 100 on the test split of each task.
        mean: Mean of the tasks.
        alignment: Mean squared distance of the pairs of STS-B's test split that people scored above 4; None if there
            are none.
        uniformity: Log of the mean of ``exp(-2 * squared distance)`` over all pairs of sentences of that split.
    """

    tasks: dict[str, float]
    mean: float
    alignment: float | None
    uniformity: float | None


def read_sts(path: Path) -> Sts:
    """Read a tab-separated file with the columns task, subset, split, score and two sentences.

    Raises:
        OSError: There is no such file.
        ValueError: A column is missing, a line is not valid (the message gives its number), or all scores of a split
            are equal.
    """
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(
            f"no such STS file: {path}; want tab-separated task, subset, split, score and two sentences"
        )
    check_file(path)
    columns: dict[tuple[str, str], tuple[list[str], list[str], list[float]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            heading = next(rows, [])
            if tuple(heading[:4]) != COLUMNS or len(heading) != 6:
                raise ValueError(
                    f"{path}: want the columns {', '.join(COLUMNS)} and two sentences, as a heading; got {heading}"
                )
            for row in rows:
                _add(columns, row, f"{path}, line {rows.line_num}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    for (task, split), (*_, scores) in columns.items():
        if len(set(scores)) == 1:
            raise ValueError(
                f"{path}: {task}, split {split}, wants pairs with different scores; got {len(scores)} with "
                f"{scores[0]:g}: no encoder ranks them well or badly, leave this split out"
            )
    return {
        key: StsPairs(first, second, np.array(scores)) for key, (first, second, scores) in columns.items()
    }


def _add(
    columns: dict[tuple[str, str], tuple[list[str], list[str], list[float]]], row: list[str], where: str
) -> None:
    if len(row) != 6:
        raise ValueError(f"{where}: want 6 columns; got {len(row)}")
    task, _, split, score, first, second = row
    try:
        value = float(score)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise ValueError(f"{where}: the score must be a number; got {score!r}")
    pairs = columns.setdefault((task, split), ([], [], []))
    for column, item in zip(pairs, (first, second, value), strict=True):
        column.append(item)  # type: ignore[attr-defined]


def spearman(first: Tensor, second: Tensor, scores: NDArray[np.float64]) -> float:
    """Spearman correlation x 100 of the cosines of ``(pairs, d)`` twice with ``scores`` ``(pairs,)``.

    NaN if all cosines are equal. They keep the dtype of the embeddings, as in sentence-transformers: ties depend on
    it.
    """
    from scipy.stats import spearmanr

    if len(scores) < 2 or len(first) != len(scores) or len(second) != len(scores):
        raise ValueError(f"want 2 or more pairs; got {len(first)}, {len(second)} rows, {len(scores)} scores")
    cosines = (F.normalize(first, dim=-1) * F.normalize(second, dim=-1)).sum(-1)
    if not cosines.isfinite().all() or bool((cosines == cosines[0]).all()):
        return math.nan  # scipy would warn
    return 100 * float(spearmanr(scores, cosines.cpu().numpy()).statistic)


class Prepared:
    """Sentences tokenised once, in batches of similar length, to be embedded repeatedly.

    Args:
        tokenizer: Tokenizer of the encoder.
        sentences: Sentences to embed.
        batch: Sentences in a batch.
    """

    def __init__(self, tokenizer: Any, sentences: Sequence[str], *, batch: int = 256) -> None:
        order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
        self.parts: list[tuple[list[int], Tokens]] = []
        for place in range(0, len(order), batch):
            numbers = order[place : place + batch]
            tokens = tokenise(tokenizer, [sentences[number] for number in numbers], LONGEST)
            self.parts.append((numbers, tokens))

    @torch.inference_mode()
    def embed(self, encoder: SentenceEncoder) -> Tensor:
        """Embeddings ``(sentences, width)`` on the CPU, in evaluation mode; restores the encoder's mode."""
        device = next(encoder.parameters()).device
        was_training = encoder.training
        encoder.eval()
        embedded = [encoder(Tokens(*(part.to(device) for part in tokens))) for _, tokens in self.parts]
        encoder.train(was_training)
        rows = torch.cat(embedded).cpu()
        numbers = torch.tensor([number for numbers, _ in self.parts for number in numbers])
        return torch.empty_like(rows).index_copy_(0, numbers, rows)


class StsTask:
    """One split of one task, prepared for an encoder's tokenizer."""

    def __init__(self, tokenizer: Any, pairs: StsPairs) -> None:
        self.pairs = pairs
        self.prepared = Prepared(tokenizer, [*pairs.first, *pairs.second])

    def spearman(self, encoder: SentenceEncoder) -> float:
        first, second = self.prepared.embed(encoder).chunk(2)
        return spearman(first, second, self.pairs.scores)


def score(embed: Embed, sts: Sts, *, bar: bool = False) -> StsScores:
    """Evaluate on the test split of every task that ``sts`` holds.

    Args:
        embed: Maps sentences to vectors ``(sentences, d)``.
        sts: Result of :func:`read_sts`.
        bar: Show progress.
    """
    from weince.progress import bars

    tasks: dict[str, float] = {}
    alignment = even = None
    present = [task for task in TASKS if (task, "test") in sts]
    with bars(shown=bar) as progress:
        shown = progress.add_task("STS", total=len(present))
        for task in present:
            pairs = sts[task, "test"]
            rows = embed([*pairs.first, *pairs.second])
            first, second = rows.chunk(2)
            tasks[task] = spearman(first, second, pairs.scores)
            if math.isnan(tasks[task]):
                raise ValueError(
                    f"the encoder gives all {len(pairs.scores)} pairs of {task} the same cosine, so that it ranks "
                    "nothing: it has collapsed"
                )
            if task == "STSB":
                positive = torch.from_numpy(pairs.scores > 4)
                unit, other = unit_in_double(first), unit_in_double(second)
                if positive.any():
                    alignment = float(pair_distances(unit[positive], other[positive]).mean())
                even = float(uniformity(torch.cat([unit, other])))
            progress.update(shown, advance=1, said=task)
    if not tasks:
        raise ValueError(f"no test split of {', '.join(TASKS)}; got {sorted(sts)}")
    return StsScores(tasks, float(np.mean(list(tasks.values()))), alignment, even)


def score_encoder(encoder: SentenceEncoder, tokenizer: Any, sts: Sts, *, bar: bool = False) -> StsScores:
    """:func:`score` of an encoder in memory."""
    return score(lambda sentences: Prepared(tokenizer, sentences).embed(encoder), sts, bar=bar)


def load_embed(model: str, *, device: str = "cpu") -> Embed:
    """Load a model as a function that embeds sentences.

    A model of sentence-transformers pools as its own settings say; the folder of any other transformer gives the
    vector of ``[CLS]``.
    """
    check_model(model)
    if Path(model).is_dir() and not (Path(model) / "modules.json").is_file():
        backbone, tokenizer = load_backbone(model)
        encoder = SentenceEncoder(backbone).to(device)
        prepare_cpu_for(encoder)
        return lambda sentences: Prepared(tokenizer, sentences).embed(encoder)
    from weince.integrations.sentence_transformers import load_model

    loaded = load_model(model, device=device)
    prepare_cpu_for(loaded)

    def embed(sentences: Sequence[str]) -> Tensor:
        rows: Tensor = loaded.encode(
            list(sentences), convert_to_tensor=True, show_progress_bar=False, batch_size=128
        )
        return rows.float().cpu()

    return embed


def evaluate_sts(model: str, sts: Path, *, device: str = "cpu", bar: bool = False) -> StsScores:
    """Scores of a model, given by folder or hub name: STS12 to STS16, STS-B, SICK-R, alignment and uniformity."""
    pairs = read_sts(sts)  # first, so that a wrong path fails before a model is loaded
    return score(load_embed(model, device=device), pairs, bar=bar)


def table(scores: StsScores, *, published: float | None = None) -> str:
    """The scores in Markdown; ``published`` is a figure for STS-B's test split to print beside ours."""
    beside = published is not None
    out = [
        f"| task | Spearman x 100 |{' published | difference |' * beside}",
        f"|---|---:|{'---:|---:|' * beside}",
    ]
    for name, value in {**scores.tasks, "mean": scores.mean}.items():
        cells = [name, f"{value:.2f}"]
        if published is not None:
            cells += [f"{published:.2f}", f"{value - published:+.2f}"] if name == "STSB" else ["", ""]
        out.append(f"| {' | '.join(cells)} |")
    spread = {"alignment": scores.alignment, "uniformity": scores.uniformity}
    known = [f"{name} {value:.4f}" for name, value in spread.items() if value is not None]
    out += ["", f"STS-B test: {', '.join(known)}."] if known else []
    if beside:
        out.append(
            "SentEval's STS files are in lower case, with blanks around punctuation. A tokenizer that lowers case "
            "and splits at punctuation, as BERT's does, makes the same word pieces of them as of the original text; "
            "for others the difference above holds the effect of this, if the file is one of them."
        )
    return "\n".join(out)
