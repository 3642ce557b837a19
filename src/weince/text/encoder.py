"""A transformer that makes one vector of a sentence, by hub name or from a local folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

POOLING = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
"""How sentence-transformers is told that the vector of a sentence is that of its first token."""


class Tokens(NamedTuple):
    """Word pieces ``(sentences, length)`` and where they are padding (0) or not (1)."""

    input_ids: Tensor
    attention_mask: Tensor


class SentenceEncoder(nn.Module):
    """The vector of a sentence's first token, ``[CLS]``, in float32.

    Args:
        backbone: A transformer of the ``transformers`` package.
        head: Put SimCSE's layer (linear, tanh) on top, in training mode only.
    """

    def __init__(self, backbone: nn.Module, *, head: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        width = int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.head: nn.Module | None = None
        if head:
            linear = nn.Linear(width, width)
            nn.init.normal_(linear.weight, std=0.02)  # as BERT begins its layers
            nn.init.zeros_(linear.bias)
            self.head = nn.Sequential(linear, nn.Tanh())

    def forward(self, tokens: Tokens) -> Tensor:
        """``(sentences, width)`` float32, not normalised."""
        output = self.backbone(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        first: Tensor = output.last_hidden_state[:, 0].float()
        if self.head is None or not self.training:
            return first
        with torch.autocast(first.device.type, enabled=False):
            vector: Tensor = self.head(first)
            return vector


def load_backbone(model: str) -> tuple[nn.Module, Any]:
    """A transformer and its tokenizer, from a folder or by hub name; only safetensors weights are read.

    Raises:
        OSError: No such folder, no such model, or no network; one line.
    """
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError("sentence encoders need a package: pip install 'weince[text]'") from error
    check_model(model)
    local = Path(model).is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=local)
        backbone = AutoModel.from_pretrained(model, local_files_only=local, use_safetensors=True)
    except Exception as error:  # what a broken folder or a missing network raises varies with the version
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        where = "the folder" if local else "the hub (is there a network?) or its cache"
        raise OSError(f"cannot load model {model!r} from {where}: {reason}") from error
    return backbone, tokenizer


def check_model(model: str) -> None:
    """Raise FileNotFoundError, before anything slow, if ``model`` is a folder that is not there or not a model's."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{model} is no model's folder: it holds no config.json")
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if not path.is_dir() and looks_local:
        raise FileNotFoundError(
            f"no such model folder: {model}; give a folder, or a hub name such as bert-base-uncased"
        )


def tokenise(tokenizer: Any, sentences: Sequence[str], max_length: int) -> Tokens:
    """Word pieces of sentences, cut to ``max_length`` and padded to the longest of them."""
    made = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    )
    return Tokens(made["input_ids"], made["attention_mask"])


def save_encoder(encoder: SentenceEncoder, tokenizer: Any, folder: Path, *, max_length: int) -> None:
    """Write an encoder without its head as a folder that transformers and sentence-transformers load."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        encoder.backbone.save_pretrained(part)  # type: ignore[operator]
        tokenizer.save_pretrained(part)
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        width = int(encoder.backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        (part / "1_Pooling").mkdir()
        _write_json(part / "modules.json", modules)
        _write_json(part / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **POOLING})
        _write_json(
            part / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
        )
        os.chmod(part, 0o755)
        shutil.rmtree(
            folder, ignore_errors=True
        )  # what is lost if the run dies here, it makes again on resuming
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
