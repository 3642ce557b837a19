"""Judge two towers: nDCG@10, recall, MRR@10 and MAP of an exact search, for each query.

All figures follow from the ranks of the answers (`weince.lab.tasks.towers.exact_search.rank_answers`); they are
those of trec_eval, times 100. With images, captions search images and images search captions; captions that were seen
in training are reported apart.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weince.lab.configure import imported
from weince.lab.tasks.towers.data import Numbers, PairSet
from weince.lab.tasks.towers.exact_search import AnswerRanks, rank_answers

Values = NDArray[np.float64]
FIGURES = ("ndcg", "recall_1", "recall_10", "recall_100", "mrr", "map")
DEPTH = 10
"""Depth of nDCG and MRR."""

Metric = Callable[[Tensor, Tensor, Sequence[Numbers]], Any]


class JudgedSearch(NamedTuple):
    """A direction of a search.

    Attributes:
        figures: Means over queries, in percent.
        each: Figures of each query, in percent.
        group: ``(q,)`` group of each query; queries of a group are not independent.
    """

    figures: dict[str, float]
    each: dict[str, Values]
    group: Numbers


def figures_of(ranks: AnswerRanks) -> dict[str, Values]:
    """All figures of each query, in percent.

    >>> figures_of(AnswerRanks(np.array([0, 0]), np.array([1, 4]), np.array([1.0, 1.0])))["recall_1"]
    array([50.])
    """
    query, rank, grade = ranks
    count = int(query[-1]) + 1
    answers = np.bincount(query, minlength=count)

    def summed(values: Values) -> Values:
        return np.bincount(query, values, minlength=count).astype(np.float64)

    number = (
        np.arange(len(query)) - (np.cumsum(answers) - answers)[query]
    )  # of an answer, from 0, nearest first
    best = grade[np.lexsort((-grade, query))]  # the ideal order
    gain = summed(np.where(rank <= DEPTH, grade / np.log2(rank + 1.0), 0))
    ideal = summed(np.where(number < DEPTH, best / np.log2(number + 2.0), 0))
    first = rank[number == 0]
    found = {
        "ndcg": gain / ideal,
        **{f"recall_{k}": summed((rank <= k).astype(float)) / answers for k in (1, 10, 100)},
        "mrr": np.where(first <= DEPTH, 1.0 / first, 0),
        "map": summed((number + 1.0) / rank) / answers,
    }
    return {name: 100 * values for name, values in found.items()}


def judge(
    pairs: PairSet,
    split: str,
    queries: Tensor,
    documents: Tensor,
    *,
    corpus: str,
    back: bool = False,
    metric: str | None = None,
) -> JudgedSearch:
    """Search the documents for the queries of a split, or with ``back`` the queries for the documents.

    Args:
        pairs: The set.
        split: Name of the split.
        queries: ``(n, d)`` embeddings of the queries of the split in ascending order of their rows.
        documents: ``(m, d)`` embeddings of the documents of ``pairs.searched(split, corpus)``.
        corpus: ``split`` or ``all``.
        back: Whether documents look for queries.
        metric: A metric of the user's own, ``my_package:metric``.
    """
    part, searched = pairs.splits[split], pairs.searched(split, corpus)
    asked, first = np.unique(part.query, return_inverse=True)
    second = np.searchsorted(searched, part.document)
    names = np.array([pairs.document_ids[row] for row in searched])
    group = _groups(pairs, split)
    if back:
        used, second = np.unique(second, return_inverse=True)
        first, second, queries, documents = second, first, documents[used.tolist()], queries
        names = np.array([pairs.query_ids[row] for row in asked])
        group = searched[used] if pairs.groups is None else pairs.groups[searched[used]]
    by_query = np.lexsort((second, first))
    first, second = first[by_query], second[by_query]
    place = np.argsort(np.argsort(names, kind="stable"), kind="stable")
    ranks = rank_answers(queries, documents, first, second, part.grade[by_query], place)
    each = figures_of(ranks)
    if metric is not None and not back:
        answers = np.split(second, np.flatnonzero(np.diff(first)) + 1)
        each[metric_name(metric)] = own_metric(metric, queries, documents, answers)
    return JudgedSearch({name: float(values.mean()) for name, values in each.items()}, each, group)


def _groups(pairs: PairSet, split: str) -> Numbers:
    """The group of each query of a split: that of its first answer, or the query itself."""
    part = pairs.splits[split]
    asked, first = np.unique(part.query, return_index=True)
    return asked if pairs.groups is None else pairs.groups[part.document[first]]


def seen_apart(pairs: PairSet, split: str, judged: JudgedSearch) -> dict[str, dict[str, float]]:
    """Figures of queries that were seen in training, and of the others; empty if all are of one kind."""
    seen = np.isin(
        pairs.keys[0][np.unique(pairs.splits[split].query)], pairs.keys[0][pairs.splits["train"].query]
    )
    if seen.all() or not seen.any():
        return {}
    return {
        name: {
            "queries": int(kept.sum()),
            **{figure: float(x[kept].mean()) for figure, x in judged.each.items()},
        }
        for name, kept in (("seen", seen), ("unseen", ~seen))
    }


def metric_name(metric: str) -> str:
    return metric.partition(":")[2]


def find_metric(metric: str) -> Metric:
    """Import a metric, ``my_package:metric``, also from the working folder.

    It gets embeddings of queries ``(q, d)`` and documents ``(m, d)`` and, for each query, the numbers of its answers;
    it returns a number for each query. Others may have written the settings that name it, so only a function of that
    module is accepted that is annotated to return a Tensor or an array.
    """
    module, wanted = imported(metric, "metric")
    module_name, _, name = metric.partition(":")
    returns = str(inspect.signature(wanted).return_annotation) if inspect.isfunction(wanted) else ""
    if (
        not inspect.isfunction(wanted)
        or wanted.__module__ != module.__name__
        or not returns.rstrip("'>]").endswith(("Tensor", "ndarray"))
    ):
        raise ValueError(
            f"metric {metric}: {module_name} must define {name}, a function that is annotated to return a Tensor "
            f"(-> Tensor); got {wanted!r}"
        )
    return wanted


def own_metric(metric: str, queries: Tensor, documents: Tensor, answers: Sequence[Numbers]) -> Values:
    try:
        values = find_metric(metric)(queries, documents, answers)
    except ValueError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"metric {metric} fails: {type(error).__name__}: {error}") from error
    each = np.asarray(values.cpu() if isinstance(values, Tensor) else values, np.float64)
    if each.shape != (len(answers),) or not np.isfinite(each).all():
        raise ValueError(
            f"metric {metric} must return a finite number for each of {len(answers)} queries; got shape {each.shape}"
        )
    return each


def as_text(figures: Mapping[str, float]) -> str:
    """Figures in one line, the most important first."""
    return "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
