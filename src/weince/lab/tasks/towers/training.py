"""Training of two towers, for the loop: batches of pairs, their negatives, and what is judged and saved.

The folder of a run holds ``run.yaml``, ``log.csv``, ``checkpoints/``, ``model/`` (the text towers, for
sentence-transformers), ``document.safetensors`` (an image tower), ``evaluation.json`` (the figures on test and
validation queries) and ``queries.npz`` (the figures of each test query).
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from weince.files import write_aside, write_text_aside
from weince.lab.tasks.base import BatchOf, Schedule, Training, View, ready_loss
from weince.lab.tasks.images.data import cache_folder
from weince.lab.tasks.towers.config import TowersRun
from weince.lab.tasks.towers.data import Numbers, PairSet
from weince.lab.tasks.towers.encoders import Store, TensorStore
from weince.lab.tasks.towers.evaluation import FIGURES, JudgedSearch, as_text, judge, seen_apart
from weince.lab.tasks.towers.exact_search import embed, key_of, products_in
from weince.lab.tasks.towers.formats import load
from weince.lab.tasks.towers.mining import mine
from weince.lab.tasks.towers.relations import Known
from weince.lab.tasks.towers.two_towers import Tower, build_towers, fingerprint_of, save_towers, stores_of
from weince.lab.training.optimizers import build_optimizer
from weince.lab.training.processes import waiting_lock

if TYPE_CHECKING:
    from lightning_fabric import Fabric

RESULT, EACH = "evaluation.json", "queries.npz"
SHORT = {"test": "test", "valid": "validation"}


class TowersTraining(Training):
    """A run of two towers that is ready to train."""

    columns: ClassVar[tuple[str, ...]] = (
        "step",
        "epoch",
        "loss",
        "lr",
        "ndcg",
        "pairs_per_second",
        "seconds",
    )
    run: TowersRun

    def __init__(self, run: TowersRun, fabric: "Fabric") -> None:
        self.run, self.fabric = run, fabric
        self.pairs = load(run.data, heldout=run.heldout, size=run.image_size, negatives=run.negatives)
        self.candidates = run.candidates
        self.train_pairs = self._training_pairs()
        torch.manual_seed(run.seed)
        self.towers = build_towers(run, self.pairs).to(self.device)
        self.width = self.towers.document.width
        self.stores = self._stores()
        # Frozen bodies are no part of what is trained and kept in checkpoints.
        self.model = self.towers.heads() if self.towers.frozen else self.towers
        self.known = Known(self.pairs, self.train_pairs, groups=run.leave_out == "groups")
        self.hard = self.train_pairs.negatives
        self._check_hard()
        size = self.part.stop - self.part.start
        self.loss = ready_loss(
            run.loss, candidates=run.candidates, pairs=size, width=self.width, device=self.device
        )
        self.optimizing = run.optimizer
        if self.towers.frozen:
            self.optimizing = replace(run.optimizer, lr=run.optimizer.lr * run.head_lr)
        self.optimizer = build_optimizer(
            self.model.parameters(),
            self.optimizing,
            of_loss=self.loss.parameters(),
            loss_lr_scale=run.loss_lr,
        )
        self.clip, self.micro_batch = run.clip, run.micro_batch
        self.schedule = self._schedule()
        self.model.train()

    # Data

    def _training_pairs(self) -> Any:
        part, run = self.pairs.splits["train"], self.run
        if run.pairs is not None and run.pairs < len(part):
            part = part.take(np.sort(np.random.default_rng(0).permutation(len(part))[: run.pairs]))
        if len(part) < run.batch:
            raise ValueError(
                f"a batch of {run.batch} needs as many training pairs; got {len(part)} in {self.pairs.name}: "
                "set a smaller batch"
            )
        return part

    def _stores(self) -> dict[str, Store]:
        run, stores = self.run, stores_of(self.run, self.towers, self.pairs, self.device)
        if not self.towers.frozen:
            return stores
        if self.fabric.global_rank == 0:
            print(
                "weince: trains a linear head on embeddings that are computed once (train head; all: every weight)",
                file=sys.stderr,
            )
        cache = cache_folder() / "embeddings"
        prompts = {"query": run.query_prompt, "document": run.document_prompt}
        cache.mkdir(parents=True, exist_ok=True)
        vectors: dict[str, Store] = {}
        self.towers.eval()
        for side, store in stores.items():
            tower: Tower = getattr(self.towers, side)
            said = side, prompts[side], str(run.max_length), self.pairs.fingerprint
            key, rows = key_of(tower.body.state_dict(), *said), np.arange(len(store.order))
            # Runs of a comparison that start together must not each embed all texts.
            with waiting_lock(cache / f"{key}.lock", partial(time.sleep, 0.5)):
                made = embed(tower.body, store, rows, what=_plural(side), cache=cache, key=key)
            vectors[side] = TensorStore("vectors", made, self.device)
        return vectors

    def _check_hard(self) -> None:
        if not self.run.hard or self.run.mine_every:
            return
        there = 0 if self.hard is None else self.hard.shape[1]
        if there < self.run.hard:
            raise ValueError(
                f"hard {self.run.hard} wants as many hard negatives of a query; got {there} in {self.pairs.name}: "
                "give negatives, the file of weince mine, or set mine_every"
            )

    def _schedule(self) -> Schedule:
        run = self.run
        in_epoch = len(self.train_pairs) // run.batch  # the last, smaller batch is left out
        segment = run.eval_every or in_epoch
        return Schedule(
            steps=run.epochs * in_epoch, in_epoch=in_epoch, segment=segment, log_every=max(1, min(25, segment)),
            judge_every=1, save_every=run.checkpoint_every,
        )  # fmt: skip

    def batches(self, start: int) -> Iterator[BatchOf]:
        run, in_epoch = self.run, self.schedule.in_epoch
        for epoch in range(start // in_epoch, run.epochs):
            order = np.random.default_rng([run.seed, epoch]).permutation(len(self.train_pairs))
            begin = start - epoch * in_epoch if epoch == start // in_epoch else 0
            if run.mine_every and epoch % run.mine_every == 0 and not begin:
                self.hard = self._mine()
            for place in range(begin, in_epoch):
                yield self._batch(order[place * run.batch : (place + 1) * run.batch], epoch)

    def _batch(self, rows: Numbers, epoch: int) -> BatchOf:
        """Rows of the queries, documents and hard negatives of a global batch, with ids and weights."""
        query, document = self.train_pairs.query[rows], self.train_pairs.document[rows]
        batch: BatchOf = {"query": query, "document": document}
        missing = None
        if self.run.hard and self.hard is not None:
            chosen = self.hard[rows]
            k = min(self.run.hard, chosen.shape[1])
            # Another choice in each epoch, if there are more than are asked for; missing ones are at the end.
            count = np.maximum((chosen >= 0).sum(1), 1)
            place = (np.arange(k) + epoch * k) % count[:, None]
            chosen = np.where(np.arange(k) < count[:, None], np.take_along_axis(chosen, place, 1), -1)
            missing = chosen < 0
            batch["negatives"] = np.where(missing, document[:, None], chosen)
        if self.run.leave_out != "nothing" or (missing is not None and missing.any()):
            ids = self.known.ids(
                query, document, batch.get("negatives"), missing, plain=self.run.leave_out == "nothing"
            )
            if ids is not None:
                batch["ids"] = torch.from_numpy(ids)
        if self.train_pairs.weight is not None:
            batch["weights"] = torch.from_numpy(self.train_pairs.weight[rows])
        return batch

    def views(self, batch: BatchOf) -> list[View]:
        part, towers = self.part, self.towers
        views = [
            View("z_i", partial(self._encode, towers.query), self.stores["query"].take(batch["query"][part])),
            View(
                "z_j",
                partial(self._encode, towers.document),
                self.stores["document"].take(batch["document"][part]),
            ),
        ]
        if "negatives" in batch:
            rows = batch["negatives"][part].reshape(-1)
            views.append(
                View("negatives", partial(self._encode, towers.document), self.stores["document"].take(rows))
            )
        return views

    def _encode(self, tower: Tower, inputs: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision == "bf16"):
            return tower(inputs)  # type: ignore[no-any-return]

    def arguments(self, rows: dict[str, Tensor], batch: BatchOf) -> dict[str, Any]:
        part, n = self.part, len(batch["query"])
        if "negatives" in rows and not self.run.shared:
            rows["negatives"] = rows["negatives"].view(part.stop - part.start, -1, self.width)
        arguments: dict[str, Any] = dict(rows)
        if "ids" in batch:
            ids = batch["ids"]
            others = ids[n:].view(n, -1)[part].flatten() if len(ids) > n else ids[:0]
            arguments["ids"] = torch.cat([ids[:n][part], others])
        if "weights" in batch:
            arguments["weights"] = batch["weights"][part]
        return arguments

    def count(self, batch: BatchOf) -> int:
        return len(batch["query"])

    def arithmetic(self) -> AbstractContextManager[Any]:
        return products_in(self.run.precision)

    # Hard negatives

    def _mine(self) -> Numbers:
        """Hard negatives of the training pairs with the towers as they are."""
        queries, documents = self._embedded("train")
        searched = self.pairs.searched("train", "split")
        mined = mine(
            self.pairs, self.train_pairs, queries, documents, searched,
            k=self.run.hard, margin=self.run.mine_margin, groups=self.run.leave_out == "groups",
        )  # fmt: skip
        return mined.document

    def state(self) -> dict[str, Any]:
        return {} if self.hard is None or not self.run.mine_every else {"hard": torch.from_numpy(self.hard)}

    def restore(self, state: dict[str, Any]) -> None:
        if "hard" in state:
            self.hard = state["hard"].numpy()

    # Judging and saving

    def _embedded(self, split: str, corpus: str = "split") -> tuple[Tensor, Tensor]:
        """Embeddings of the queries of a split, and of the documents that they search."""
        towers = self.towers
        part = self.train_pairs if split == "train" else self.pairs.splits[split]
        self.towers.eval()
        try:
            with products_in("fp32"):
                return (
                    embed(towers.query, self.stores["query"], np.unique(part.query), what="queries"),
                    embed(
                        towers.document,
                        self.stores["document"],
                        self.pairs.searched(split, corpus),
                        what="documents",
                    ),
                )
        finally:
            self.model.train()

    def judge(self, step: int) -> dict[str, float]:
        queries, documents = self._embedded("valid")
        return {"ndcg": judge(self.pairs, "valid", queries, documents, corpus="split").figures["ndcg"]}

    def finish(self, *, bar: bool) -> Path:
        save_towers(self.run, self.towers)
        write_result(self.run, self.pairs, self._embedded, fingerprint=self.fingerprint())
        # They are three times as large as the encoder, and a run that is done needs none.
        shutil.rmtree(self.run.out / "checkpoints", ignore_errors=True)
        return self.run.out

    def fingerprint(self) -> str:
        return fingerprint_of(self.run, self.pairs)

    def figures(self, row: Any) -> tuple[str, ...]:
        speed = f"{row['pairs_per_second']:,.0f} pairs/s"
        ndcg = (f"nDCG@10 {row['ndcg']:.2f}",) if "ndcg" in row else ()
        return (*ndcg, f"loss {row['loss']:.4f}", speed)


def write_result(
    run: TowersRun,
    pairs: PairSet,
    embedded: Callable[[str, str], tuple[Tensor, Tensor]],
    *,
    fingerprint: str,
    other: str = "",
) -> Path:
    """Judge towers on validation and test queries, and write ``evaluation.json`` and ``queries.npz``.

    On ``other`` data the files have its name.
    """
    content: dict[str, Any] = {"corpus": run.corpus, "data": pairs.name, "fingerprint": fingerprint}
    each: dict[str, Any] = {}
    for split, name in SHORT.items():
        queries, documents = embedded(split, run.corpus)
        judged = judge(pairs, split, queries, documents, corpus=run.corpus, metric=run.metric)
        content |= {f"{figure}_{name}": value for figure, value in judged.figures.items()}
        if split == "test":
            content |= {
                "queries": len(queries),
                "documents": len(documents),
                **_further(run, pairs, judged, queries, documents),
            }
            each = {
                "group": judged.group,
                **{figure: x.astype(np.float32) for figure, x in judged.each.items()},
            }
    path, further = (run.out / name for name in (RESULT, EACH))
    if other:
        path, further = (place.with_stem(f"{place.stem}_{other}") for place in (path, further))
    write_aside(further, partial(_save_arrays, each), "figures")
    write_text_aside(path, json.dumps(content, indent=2) + "\n", "figures")
    return path


def _further(
    run: TowersRun, pairs: PairSet, judged: JudgedSearch, queries: Tensor, documents: Tensor
) -> dict[str, Any]:
    """For images: figures of queries seen in training and of unseen ones, and of searching captions by image."""
    if not isinstance(pairs.documents, np.ndarray):
        return {}
    back = judge(pairs, "test", queries, documents, corpus=run.corpus, back=True)
    return {**seen_apart(pairs, "test", judged), "back": back.figures}


def _save_arrays(arrays: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _plural(side: str) -> str:
    return {"query": "queries", "document": "documents"}[side]


def result_text(content: dict[str, Any]) -> str:
    """The figures of a run in a few lines."""
    lines = [
        f"test: {as_text({name: content[f'{name}_test'] for name in FIGURES})}",
        f"valid: {as_text({name: content[f'{name}_validation'] for name in FIGURES})}",
    ]
    lines += [f"{name}: {as_text(content[name])}" for name in ("seen", "unseen", "back") if name in content]
    return "\n".join(lines)
