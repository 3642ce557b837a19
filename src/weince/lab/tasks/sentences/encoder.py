"""A transformer that maps a sentence to one vector, loaded by hub name or from a local folder."""

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from weince.integrations.hub import cannot_load, only_here

Pooling = Literal["cls", "mean"]
"""The vector of a sentence: the vector of its first token, or the mean over its tokens."""


class Tokens(NamedTuple):
    """Word pieces ``(sentences, length)``, and a mask that is 0 at padding and 1 elsewhere."""

    input_ids: Tensor
    attention_mask: Tensor


class SentenceEncoder(nn.Module):
    """Maps sentences to vectors in float32.

    Args:
        backbone: A transformer of the ``transformers`` package.
        head: Put SimCSE's layer (linear, tanh) on top, in training mode only.
        pooling: Use the vector of the first token, ``[CLS]``, or the mean over all tokens except padding.
    """

    def __init__(self, backbone: nn.Module, *, head: bool = False, pooling: Pooling = "cls") -> None:
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        width = int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.head: nn.Module | None = None
        if head:
            linear = nn.Linear(width, width)
            nn.init.normal_(linear.weight, std=0.02)  # as BERT initialises its layers
            nn.init.zeros_(linear.bias)
            self.head = nn.Sequential(linear, nn.Tanh())

    def forward(self, tokens: Tokens) -> Tensor:
        """``(sentences, width)`` float32, not normalised."""
        output = self.backbone(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        pooled = self._pool(output.last_hidden_state, tokens.attention_mask)
        if self.head is None or not self.training:
            return pooled
        with torch.autocast(pooled.device.type, enabled=False):
            vector: Tensor = self.head(pooled)
            return vector

    def _pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "cls":
            return hidden[:, 0].float()
        counts = mask.unsqueeze(-1).float()
        return (hidden.float() * counts).sum(1) / counts.sum(1)


def load_backbone(model: str) -> tuple[nn.Module, Any]:
    """Load a transformer and its tokenizer from a folder or by hub name; only safetensors weights are read.

    Raises:
        OSError: No such folder, no such model, or no network; the message is one line.
    """
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError("sentence encoders need a package: pip install 'weince[text]'") from error
    check_model(model)
    local = only_here(model)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=local)
            backbone, loaded = AutoModel.from_pretrained(
                model, local_files_only=local, use_safetensors=True, output_loading_info=True
            )
    except Exception as error:  # the types for a broken folder or a missing network vary between versions
        raise cannot_load(model, local, error) from error
    # The pooler is not used.
    missing = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise OSError(
            f"cannot load model {model!r}: {len(missing)} weights are missing, the first {missing[0]}"
        )
    return backbone, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing its own progress bars over ours and from listing unused weights."""
    logging = importlib.import_module("transformers.utils.logging")
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def check_model(model: str) -> None:
    """Raise FileNotFoundError early if ``model`` is a folder that is missing or holds no model."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        best = path / "best"  # folder of the model in a run of weince train
        hint = f" (did you mean {best}?)" if (best / "config.json").is_file() else ""
        raise FileNotFoundError(f"{model} is no model's folder: it holds no config.json{hint}")
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if not path.is_dir() and looks_local:
        raise FileNotFoundError(
            f"no such model folder: {model}; give a folder, or a hub name such as bert-base-uncased"
        )


def tokenise(tokenizer: Any, sentences: Sequence[str], max_length: int, *, whole: bool = False) -> Tokens:
    """Word pieces of sentences, cut to ``max_length``; padded to the longest, or with ``whole`` to ``max_length``."""
    encoded = tokenizer(
        list(sentences),
        padding="max_length" if whole else True,
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
    )
    return Tokens(encoded["input_ids"], encoded["attention_mask"])


def save_encoder(
    encoder: SentenceEncoder, tokenizer: Any, folder: Path, *, max_length: int, weights: dict[str, Tensor]
) -> None:
    """Write an encoder without its head as a folder that transformers and sentence-transformers load.

    Args:
        encoder: The encoder.
        tokenizer: Tokenizer of the encoder.
        folder: Folder to write; an existing one is replaced.
        max_length: Largest number of word pieces of a sentence, for sentence-transformers.
        weights: Weights of the encoder's backbone, by name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with quiet():
            encoder.backbone.save_pretrained(part, state_dict=weights)  # type: ignore[operator]
        tokenizer.save_pretrained(part)
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        width = int(encoder.backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        (part / "1_Pooling").mkdir()
        _write_json(part / "modules.json", modules)
        said = {"pooling_mode_cls_token": encoder.pooling == "cls"}
        said |= {"pooling_mode_mean_tokens": encoder.pooling == "mean"}
        _write_json(part / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **said})
        _write_json(
            part / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
        )
        os.chmod(part, 0o755)
        # If the run dies between these two lines, it writes the folder again after resuming.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
