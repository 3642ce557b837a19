"""Encoders of queries and of documents: sentence-transformers models, a bag of word pieces, image encoders, your own.

A `Tower` is a body and perhaps a linear head. Its body turns items into a `Store` once: texts become word pieces that
stay on the device, and a batch is cut from them there. What is saved loads in sentence-transformers with one line.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weince.integrations.hub import cannot_load, only_here
from weince.lab.configure import find
from weince.lab.tasks.images.encoders import build as build_image_encoder
from weince.lab.tasks.sentences.encoder import check_model, quiet
from weince.lab.tasks.towers.data import Items, Numbers

BAG = "bag"
"""A bag of word pieces that are learned from the training texts, with new weights."""

PIECES, BAG_WIDTH, BAG_LENGTH = 8192, 256, 256
STATIC = "sentence_transformers.models.StaticEmbedding"
MODEL = "model"
"""Folder of the saved encoder in the folder of a run."""


class Store(Protocol):
    """Items that are ready for an encoder; ``order`` is one in which neighbours take equal time."""

    order: NDArray[np.int64]

    def take(self, rows: Numbers) -> dict[str, Any]: ...


def kept(rows: Tensor, device: torch.device) -> Tensor:
    """The rows on the device, if they take less than half of its free memory; else where they are."""
    size = rows.numel() * rows.element_size()
    fits = device.type != "cuda" or size < torch.cuda.mem_get_info(device)[0] / 2
    return rows.to(device) if fits else rows


class PieceStore:
    """Word pieces of texts, one text after the other, on a device."""

    def __init__(self, texts: Sequence[Sequence[int]], padding: int, device: torch.device) -> None:
        self.lengths = np.array([max(1, len(text)) for text in texts], np.int64)
        flat = np.concatenate([np.asarray(text if len(text) else [padding], np.int32) for text in texts])
        self.flat, self.padding, self.device = kept(torch.from_numpy(flat), device), padding, device
        self.starts = torch.from_numpy(np.cumsum(self.lengths) - self.lengths).to(self.flat.device)
        self.order = np.argsort(self.lengths, kind="stable")

    def take(self, rows: Numbers) -> dict[str, Tensor]:
        """Word pieces ``(n, longest)`` and a mask that is 0 at padding."""
        device, lengths = self.flat.device, self.lengths[rows]
        place = torch.arange(int(lengths.max()), device=device)
        mask = place < torch.from_numpy(lengths).to(device)[:, None]
        start = self.starts[torch.from_numpy(rows).to(device)][:, None]
        pieces = self.flat[(start + place).where(mask, 0)].long()
        inputs = {"input_ids": pieces.where(mask, self.padding), "attention_mask": mask.long()}
        return {name: x.to(self.device, non_blocking=True) for name, x in inputs.items()}


class TensorStore:
    """Tensors of items, one row each: images, or what a frozen body made of its items."""

    def __init__(self, name: str, rows: Tensor, device: torch.device) -> None:
        self.name, self.rows, self.device, self.order = name, kept(rows, device), device, np.arange(len(rows))

    def take(self, rows: Numbers) -> dict[str, Tensor]:
        chosen = self.rows[torch.from_numpy(rows).to(self.rows.device)]
        return {self.name: chosen.to(self.device, non_blocking=True)}


class TextStore:
    """Texts that a body tokenises batch by batch."""

    def __init__(self, texts: Sequence[str], tokenise: Any, device: torch.device) -> None:
        self.texts, self.tokenise, self.device = texts, tokenise, device
        self.order = np.argsort([len(text) for text in texts], kind="stable")

    def take(self, rows: Numbers) -> dict[str, Any]:
        inputs = self.tokenise([self.texts[row] for row in rows])
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


class Embedder(nn.Module):
    """An encoder of items; ``width`` is that of its vectors."""

    width: int

    def store(self, items: Items, device: torch.device, prompt: str = "") -> Store:
        raise NotImplementedError

    def modules_to_save(self) -> "list[nn.Module]":
        """As modules of sentence-transformers; empty if it is none, and then its weights are saved."""
        return []


class StaticEmbedder(Embedder):
    """Mean of the vectors of a text's word pieces, sentence-transformers' StaticEmbedding."""

    def __init__(self, tokenizer: Any, weights: Tensor) -> None:
        super().__init__()
        self.tokenizer, self.width = tokenizer, weights.shape[1]
        self.tokenizer.no_padding()
        # One more row, for padding, which the mean leaves out.
        rows = torch.cat([weights.float(), torch.zeros(1, self.width)])
        self.embedding = nn.EmbeddingBag.from_pretrained(rows, freeze=False, padding_idx=len(weights))

    def store(self, items: Items, device: torch.device, prompt: str = "") -> Store:
        texts = [prompt + text for text in _texts(items)]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return PieceStore([text.ids for text in encoded], self.embedding.num_embeddings - 1, device)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.embedding(inputs["input_ids"])  # type: ignore[no-any-return]

    def weights(self) -> Tensor:
        return self.embedding.weight.detach()[:-1].cpu().contiguous()

    def modules_to_save(self) -> list[nn.Module]:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        return [StaticEmbedding(self.tokenizer, embedding_weights=self.weights())]

    def save(self, folder: Path, prompts: Mapping[str, str]) -> None:
        """The folder that sentence-transformers would write; its import takes seconds that a small run does not."""
        from safetensors.torch import save_file

        part = folder / "0_StaticEmbedding"
        part.mkdir()
        self.tokenizer.save(str(part / "tokenizer.json"))
        save_file({"embedding.weight": self.weights()}, part / "model.safetensors")
        modules = [{"idx": 0, "name": "0", "path": part.name, "type": STATIC}]
        write_json(folder / "modules.json", modules)
        said = {"model_type": "SentenceTransformer", "prompts": dict(prompts), "similarity_fn_name": "cosine"}
        write_json(folder / "config_sentence_transformers.json", said)


class SentenceEmbedder(Embedder):
    """A model of sentence-transformers."""

    def __init__(self, model: Any, max_length: int | None) -> None:
        super().__init__()
        self.model = model
        if max_length is not None:
            model.max_seq_length = max_length
        self.width = int(model.get_embedding_dimension())

    def store(self, items: Items, device: torch.device, prompt: str = "") -> Store:
        first, texts = self.model[0], _texts(items)
        if type(first).__name__ != "Transformer" or getattr(first, "tokenizer", None) is None:
            return TextStore(texts, partial(self.model.preprocess, prompt=prompt or None), device)
        tokenizer = first.tokenizer
        pieces: list[list[int]] = []
        for start in range(0, len(texts), 10_000):
            some = [prompt + text for text in texts[start : start + 10_000]]
            made = tokenizer(some, truncation=True, max_length=first.max_seq_length, padding=False)
            pieces += made["input_ids"]
        return PieceStore(pieces, tokenizer.pad_token_id or 0, device)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.model(dict(inputs))["sentence_embedding"].float()  # type: ignore[no-any-return]

    def modules_to_save(self) -> list[nn.Module]:
        return list(self.model.children())


class OwnEmbedder(Embedder):
    """A module of the user's own with ``tokenize(texts)``, which returns tensors by name, rows first."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        if not callable(getattr(module, "tokenize", None)):
            raise ValueError(
                f"encoder {name} must be a SentenceTransformer or have a method tokenize(texts) that returns tensors "
                f"by name, which its forward gets; got {type(module).__name__}"
            )
        self.name, self.module = name, module
        self.width = self._width()

    def store(self, items: Items, device: torch.device, prompt: str = "") -> Store:
        return TextStore([prompt + text for text in _texts(items)], self.module.tokenize, device)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.module(dict(inputs))  # type: ignore[no-any-return]

    @torch.no_grad()
    def _width(self) -> int:
        try:
            rows = self.eval()(self.module.tokenize(["a text", "another text"]))  # type: ignore[operator]
        except Exception as error:  # whatever the user's code raises
            raise ValueError(
                f"encoder {self.name} fails on two texts: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != 2:
            got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"encoder {self.name} must map n texts to embeddings (n, width); got {got} for two"
            )
        return rows.shape[1]


class ImageEmbedder(Embedder):
    """An image encoder of the laboratory, of timm or of torchvision."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.encoder = build_image_encoder(name, size=size)
        self.width = cast(int, self.encoder.features)

    def store(self, items: Items, device: torch.device, prompt: str = "") -> Store:
        return TensorStore("images", torch.from_numpy(np.ascontiguousarray(items)), device)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        images = inputs["images"].movedim(-1, 1).float() / 255
        return self.encoder(images.expand(-1, 3, -1, -1)).float()  # type: ignore[no-any-return]


def text_body(name: str, *, texts: Sequence[str], max_length: int | None, side: str) -> Embedder:
    """The body of a text tower.

    Args:
        name: ``bag``; your own, ``my_package:factory``; or a sentence-transformers model, by folder or hub name.
        texts: Training texts, from which a bag learns its word pieces.
        max_length: Most word pieces of a text; None for what the model says.
        side: ``query`` or ``document``: which part of a model that routes the two.
    """
    if name == BAG:
        tokenizer = learn_pieces(texts, max_length or BAG_LENGTH)
        weights = torch.randn(tokenizer.get_vocab_size(), BAG_WIDTH) * BAG_WIDTH**-0.5
        return StaticEmbedder(tokenizer, weights)
    if ":" in name and not Path(name).exists():
        try:
            module = find(name, "encoder")()
        except ValueError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ValueError(f"encoder {name} fails: {type(error).__name__}: {error}") from error
        if type(module).__name__ == "SentenceTransformer":
            return SentenceEmbedder(module, max_length)
        return OwnEmbedder(name, module)
    if _is_static(Path(name)):
        return load_static(Path(name), max_length)
    return SentenceEmbedder(load_sentences(name, side), max_length)


def learn_pieces(texts: Sequence[str], max_length: int) -> Any:
    """A tokenizer with word pieces for these texts; the same for the same texts."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}"), "removed", invert=True)
    trainer = trainers.BpeTrainer(vocab_size=PIECES, min_frequency=2, show_progress=False, limit_alphabet=512)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _is_static(folder: Path) -> bool:
    path = folder / "modules.json"
    if not path.is_file():
        return False
    types = [str(part.get("type")) for part in json.loads(path.read_text(encoding="utf-8"))]
    return len(types) == 1 and types[0].endswith(".StaticEmbedding")


def load_static(folder: Path, max_length: int | None) -> StaticEmbedder:
    """A saved StaticEmbedding, without an import of sentence-transformers."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    place = folder / json.loads((folder / "modules.json").read_text(encoding="utf-8"))[0]["path"]
    try:
        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        weights = load_file(place / "model.safetensors")["embedding.weight"]
    except Exception as error:  # the types vary
        raise cannot_load(str(folder), True, error) from error
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return StaticEmbedder(tokenizer, weights)


def load_sentences(name: str, side: str) -> Any:
    """A model of sentence-transformers; of one that routes queries and documents, that side."""
    if not (Path(name) / "modules.json").is_file():
        model_of_run = Path(name) / MODEL
        if (model_of_run / "modules.json").is_file():
            raise FileNotFoundError(f"{name} is the folder of a run (did you mean {model_of_run}?)")
        check_model(name)
    from sentence_transformers import SentenceTransformer

    local = only_here(name)
    try:
        with quiet():
            model = SentenceTransformer(
                name, device="cpu", local_files_only=local, model_kwargs={"use_safetensors": True}
            )
    except Exception as error:  # the types for a broken folder or a missing network vary
        raise cannot_load(name, local, error) from error
    if type(model[0]).__name__ == "Router":
        routes: Any = model[0].sub_modules
        return SentenceTransformer(modules=list(routes[side]), device="cpu")
    return model.float()


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _texts(items: Items) -> Sequence[str]:
    if isinstance(items, np.ndarray):
        raise ValueError("this encoder is for texts; got images: name an image encoder, such as resnet18")
    return items
