"""The two towers of a run: built from its settings, saved, and loaded again."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from weince.files import write_aside
from weince.lab.tasks.sentences.encoder import quiet
from weince.lab.tasks.towers.config import TowersRun
from weince.lab.tasks.towers.data import PairSet
from weince.lab.tasks.towers.encoders import (
    BAG,
    MODEL,
    Embedder,
    ImageEmbedder,
    SentenceEmbedder,
    StaticEmbedder,
    Store,
    text_body,
)
from weince.machine import find_device

WIDTH = 256
"""Width of the embeddings if the towers differ in theirs."""

SIDES = ("query", "document")


class Tower(nn.Module):
    """A body, and a linear head if the embeddings have another width or the body is frozen.

    Args:
        body: The encoder.
        width: Width of the embeddings.
        head: Put a linear layer on top; it begins as the identity if the width stays.
    """

    def __init__(self, body: Embedder, width: int, *, head: bool) -> None:
        super().__init__()
        self.body, self.width = body, width
        self.head = nn.Linear(body.width, width, bias=False) if head else None
        if self.head is not None and body.width == width:
            nn.init.eye_(self.head.weight)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """``(n, width)`` from a batch of a store; from vectors of the body under the name ``vectors``, too."""
        vectors = inputs["vectors"] if "vectors" in inputs else self.body(inputs)
        if self.head is None:
            return cast(Tensor, vectors)
        with torch.autocast(vectors.device.type, enabled=False):
            return cast(Tensor, self.head(vectors.float()))

    def modules_to_save(self) -> list[nn.Module]:
        """As modules of sentence-transformers; empty if the body is none."""
        modules = self.body.modules_to_save()
        if modules and self.head is not None:
            from sentence_transformers.base.modules import Dense

            dense = Dense(self.body.width, self.width, bias=False, activation_function=nn.Identity())
            dense.linear.weight.data.copy_(self.head.weight.detach())
            modules = [*modules, dense]
        return modules


class Towers(nn.Module):
    """Both towers; the same one twice if they share their weights.

    Args:
        query: Embeds queries.
        document: Embeds documents.
        frozen: Only the heads are trained.
    """

    def __init__(self, query: Tower, document: Tower, *, frozen: bool = False) -> None:
        super().__init__()
        self.query, self.document, self.frozen = query, document, frozen

    def heads(self) -> nn.Module:
        """The heads alone."""
        return nn.ModuleDict({side: getattr(self, side).head for side in SIDES})


def build_towers(run: TowersRun, pairs: PairSet, *, folder: Path | None = None) -> Towers:
    """The towers of a run.

    Args:
        run: The settings.
        pairs: The data: whether documents are images, and the texts that a bag learns its pieces from.
        folder: Folder of a trained run, from which to load both; else they start from the run's encoders.
    """
    images = isinstance(pairs.documents, np.ndarray)
    names = {"query": run.query_model or (BAG if images else run.model), "document": run.model}
    saved = {side: folder is not None and not (folder / f"{side}.safetensors").is_file() for side in SIDES}
    shared = run.query_model is None and not images
    texts = _training_texts(pairs) if BAG in names.values() else []
    bodies: dict[str, Embedder] = {}
    for side in ("document",) if shared else SIDES:
        if images and side == "document":
            bodies[side] = ImageEmbedder(names[side], run.image_size)
        else:
            name = str(folder / MODEL) if folder and saved[side] else names[side]
            bodies[side] = text_body(name, texts=texts, max_length=run.max_length, side=side)
    widths = {body.width for body in bodies.values()}
    if len(widths) > 1 and run.projection is None and not images:
        raise ValueError(
            f"both encoders must have one width; got {bodies['query'].width} for queries and "
            f"{bodies['document'].width} for documents: set projection, the width of a linear layer on top"
        )
    width = run.projection or (widths.pop() if len(widths) == 1 else WIDTH)
    frozen = _frozen(run, bodies)
    towers = {
        # What is saved for sentence-transformers has its head among its modules.
        side: Tower(body, width, head=not saved[side] and (frozen or body.width != width))
        for side, body in bodies.items()
    }
    if folder is not None:
        from safetensors.torch import load_file

        for side, tower in towers.items():
            if not saved[side]:
                tower.load_state_dict(load_file(folder / f"{side}.safetensors"))
    return Towers(towers.get("query", towers["document"]), towers["document"], frozen=frozen)


def _training_texts(pairs: PairSet) -> list[str]:
    train = pairs.splits["train"]
    sides = ((pairs.queries, train.query), (pairs.documents, train.document))
    return [
        str(items[row])
        for items, rows in sides
        if not isinstance(items, np.ndarray)
        for row in np.unique(rows)
    ]


def _frozen(run: TowersRun, bodies: Mapping[str, Embedder]) -> bool:
    if run.train != "auto":
        return run.train == "head"
    return find_device(run.device).type == "cpu" and all(
        isinstance(body, SentenceEmbedder) for body in bodies.values()
    )


def stores_of(run: TowersRun, towers: Towers, pairs: PairSet, device: torch.device) -> dict[str, Store]:
    """Queries and documents, ready for their towers."""
    return {
        "query": towers.query.body.store(pairs.queries, device, run.query_prompt),
        "document": towers.document.body.store(pairs.documents, device, run.document_prompt),
    }


def fingerprint_of(run: TowersRun, pairs: PairSet) -> str:
    """Identifies what a run starts from: its data, and the files of its encoders or else their names."""
    digest = hashlib.blake2b(pairs.fingerprint.encode(), digest_size=8)
    for name in (run.model, run.query_model or ""):
        files = sorted(Path(name).rglob("*.safetensors")) if name and Path(name).is_dir() else []
        digest.update(name.encode() if not files else b"")
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def save_towers(run: TowersRun, towers: Towers) -> None:
    """Write both towers into a run's folder: for sentence-transformers, or else as weights alone."""
    from safetensors.torch import save_file

    shared = towers.query is towers.document
    sides: dict[str, Tower] = (
        {"document": towers.document} if shared else {"query": towers.query, "document": towers.document}
    )
    known = {
        side: tower
        for side, tower in sides.items()
        if isinstance(tower.body, StaticEmbedder | SentenceEmbedder)
    }
    for side, tower in sides.items():
        if side not in known:
            weights = {name: x.detach().cpu().clone().contiguous() for name, x in tower.state_dict().items()}
            write_aside(run.out / f"{side}.safetensors", partial(save_file, weights), "weights")
    if known:
        prompts = {"query": run.query_prompt, "document": run.document_prompt}
        save_text_towers(run.out / MODEL, list(known.values()), prompts)


def save_text_towers(folder: Path, towers: list[Tower], prompts: dict[str, str]) -> None:
    """Write one tower, or those of queries and documents, as a folder that sentence-transformers loads."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        first = towers[0]
        if len(towers) == 1 and isinstance(first.body, StaticEmbedder) and first.head is None:
            first.body.save(part, prompts)
        else:
            with quiet():
                _routed(towers, prompts).save_pretrained(str(part), create_model_card=False)
        os.chmod(part, 0o755)
        # If the run dies between these two lines, it writes the folder again after resuming.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _routed(towers: list[Tower], prompts: dict[str, str]) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    modules = [tower.modules_to_save() for tower in towers]
    if len(modules) == 2:
        modules = [[Router.for_query_document(*modules)]]  # type: ignore[arg-type]
    device = next(towers[0].parameters()).device
    return SentenceTransformer(modules=modules[0], device=str(device), prompts=prompts).eval()
