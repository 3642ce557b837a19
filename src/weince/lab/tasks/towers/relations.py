"""Which rows of a batch are known not to be negatives of each other: duplicates, known answers, groups."""

import numpy as np
from numpy.typing import NDArray

from weince.lab.tasks.towers.data import Numbers, PairSet, Relevance


class Known:
    """What is known about training pairs.

    Args:
        pairs: The set.
        train: The training pairs.
        groups: Documents of a group are no negatives of each other either.
    """

    def __init__(self, pairs: PairSet, train: Relevance, *, groups: bool) -> None:
        queries, documents = pairs.keys
        if groups and pairs.groups is None:
            raise ValueError(f"leave_out groups wants groups of documents; got {pairs.name} without")
        self.query, self.document = (
            queries,
            pairs.groups if groups and pairs.groups is not None else documents,
        )
        # The answers of each query, equal queries taken together.
        asked, answer = queries[train.query], self.document[train.document]
        by_query = np.lexsort((answer, asked))
        self.answers = answer[by_query]
        self.start = np.searchsorted(asked[by_query], np.arange(queries.max() + 2))

    def ids(
        self,
        query: Numbers,
        document: Numbers,
        negatives: Numbers | None,
        missing: NDArray[np.bool_] | None,
        *,
        plain: bool = False,
    ) -> Numbers | None:
        """Ids of a batch's pairs ``(n,)`` and hard negatives ``(n k,)``; None if all are different.

        Args:
            query: ``(n,)`` rows of queries.
            document: ``(n,)`` rows of documents.
            negatives: ``(n, k)`` rows of documents.
            missing: ``(n, k)``: hard negatives that only fill a gap and count for nobody with the same id.
            plain: All are different but for these.
        """
        n = len(query)
        others = np.empty(0, np.int64) if negatives is None else negatives.reshape(-1)
        if plain:
            ids = np.arange(n + len(others))
        else:
            ids = self._related(self.query[query], self.document[np.concatenate([document, others])])
        if missing is not None and missing.any():
            gaps = n + np.flatnonzero(missing.reshape(-1))
            ids[gaps] = ids[(gaps - n) // missing.shape[1]]
        return None if len(np.unique(ids)) == len(ids) else ids

    def _related(self, asked: Numbers, answer: Numbers) -> Numbers:
        """A number for each document, equal for those that share a query, directly or through others."""
        from scipy.sparse import coo_array  # here, since it takes time to import
        from scipy.sparse.csgraph import connected_components

        queries, of_query = np.unique(asked, return_inverse=True)
        documents, of_document = np.unique(answer, return_inverse=True)
        counts = self.start[queries + 1] - self.start[queries]
        if len(documents) == len(answer) and len(queries) == len(asked) and counts.max(initial=0) < 2:
            return np.arange(len(answer))
        # All known answers of these queries, as far as they are in the batch.
        first = np.repeat(np.arange(len(queries)), counts)
        place = (
            np.arange(counts.sum())
            - np.repeat(np.cumsum(counts) - counts, counts)
            + self.start[queries][first]
        )
        column = np.minimum(np.searchsorted(documents, self.answers[place]), len(documents) - 1)
        present = documents[column] == self.answers[place]
        left = np.concatenate([of_query, first[present]])
        right = np.concatenate([of_document[: len(asked)], column[present]])
        size = len(queries) + len(documents)
        joined = coo_array((np.ones(len(left)), (left, len(queries) + right)), shape=(size, size))
        number: Numbers = connected_components(joined, directed=False)[1].astype(np.int64)
        return number[len(queries) + of_document]
