"""Losses for the trainer of sentence-transformers, to replace its ``MultipleNegativesRankingLoss``.

    from weince.integrations.sentence_transformers import WeinceLoss

    loss = WeinceLoss(model, temperature=0.05)  # was: MultipleNegativesRankingLoss(model, scale=20)
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

The columns are the same: anchor, positive, then any number of hard negatives. Every anchor of the batch competes for
its positive with all positives and all hard negatives of the batch. ``temperature`` is ``1 / scale`` of that loss;
the similarity is always the cosine.

Use :class:`LossAdapter` for any other loss of weince: ``LossAdapter(model, weince.InfoNCELoss(0.05,
candidates="cross"))`` is ``MultipleNegativesRankingLoss``.
"""

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

import weince
from weince.distributed import average, is_spread
from weince.integrations.hub import cannot_load, only_here
from weince.losses.weince import WeinceOptions
from weince.parameters import Scalar
from weince.scores import joined
from weince.tail import TailConfig

try:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.losses import CachedLossMixin, has_static_embedding_input
    from sentence_transformers.base.losses.merged_forward import embed_columns
except ImportError as error:
    raise ImportError(
        "weince.integrations.sentence_transformers needs sentence-transformers 6.0 or newer: "
        f"pip install 'weince[text]' ({error})"
    ) from error

__all__ = ["CachedLossAdapter", "CachedWeinceLoss", "LossAdapter", "WeinceLoss", "load_model"]

Features = dict[str, Any]

CITATION = """
@inproceedings{erol2026softmax,
    title = {When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE},
    author = {Erol, Melihcan and Evren, Suat and Ozel, Oktay and Morgan, Alexander and Ryu, Jongha Jon and
              Zheng, Lizhong},
    booktitle = {Proceedings of the 43rd International Conference on Machine Learning},
    year = {2026},
}
"""


class LossAdapter(nn.Module):
    """Any loss of weince as a loss for ``SentenceTransformerTrainer``.

    The loss determines which columns the dataset must have:

    - ``candidates="cross"``: anchor, positive and any number of hard negatives;
    - ``candidates="clip"`` or ``"views"``: two columns of positives;
    - ``candidates="labels"``: one or two columns of sentences, and an integer label.

    A batch of one row without hard negatives, such as a small last batch, has nothing to contrast with: its loss and
    all gradients are 0, and a warning says so.

    Args:
        model: The ``SentenceTransformer`` to train.
        loss: A loss with ``reduction="mean"`` or ``"sum"``. Its ``gather`` includes the candidates of other devices.

    Examples:
        >>> from torch import nn
        >>> from weince import DCLLoss
        >>> from weince.integrations.sentence_transformers import LossAdapter
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> loss = LossAdapter(model, DCLLoss(0.05, candidates="cross"))  # SentenceTransformerTrainer(loss=loss, ...)
    """

    def __init__(self, model: nn.Module, loss: weince.ContrastiveLoss) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a SentenceTransformer; got {type(model).__name__}")
        if not isinstance(loss, weince.ContrastiveLoss):
            raise TypeError(f"loss must be a loss of weince, like WeinceLoss(); got {type(loss).__name__}")
        if loss.reduction == "none":
            raise ValueError('a trainer wants one number: reduction must be "mean" or "sum"; got "none"')
        self.model = model
        self.loss = loss
        self._averages = False  # whether hooks average the gradients of the loss's own parameters

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the tokens of each column."""
        columns = list(sentence_features)
        self._check_columns(len(columns), labels)
        return self.compute_loss_from_embeddings(embed_columns(self.model, columns), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the embeddings ``(n, d)`` of each column."""
        self._check_columns(len(embeddings), labels)
        first, *others = embeddings
        value: Tensor
        self.loss.train(self.model.training)  # the trainer puts only the model into evaluation mode
        if is_spread() and not self._averages:  # nor does it wrap the loss for several devices
            self._averages = True
            for own in self.loss.parameters():
                if own.requires_grad:
                    own.register_hook(average)  # type: ignore[no-untyped-call]
        if self._nothing_to_contrast(embeddings):
            warnings.warn(
                "a batch of one row has nothing to contrast with: its loss is 0; "
                "dataloader_drop_last=True leaves such a last batch out",
                stacklevel=2,
            )
            # With the parameters of the loss, so that their hooks meet those of the other devices.
            parameters = (own.sum() for own in self.loss.parameters())
            return sum((*(rows.sum() for rows in others), *parameters), first.sum()) * 0.0
        if self.loss.candidates == "labels":
            value = self.loss(first, *others, labels=labels)
        else:
            negatives = joined(others[1:]) if len(others) > 1 else None
            value = self.loss(first, others[0], negatives=negatives)
        return value

    def _nothing_to_contrast(self, embeddings: list[Tensor]) -> bool:
        elsewhere = bool(self.loss.gather) and is_spread()  # other devices add candidates
        return len(embeddings[0]) == 1 and len(embeddings) <= 2 and not elsewhere

    def _check_columns(self, number: int, labels: Tensor | None) -> None:
        candidates = self.loss.candidates
        wanted, right = {
            "cross": ("2 columns or more: anchor, positive, hard negatives", number >= 2),
            "clip": ("2 columns: anchor, positive", number == 2),
            "views": ("2 columns: anchor, positive", number == 2),
            "labels": ("1 or 2 columns and integer labels", number in (1, 2) and labels is not None),
        }[candidates]
        if not right:
            and_labels = " without labels" if candidates == "labels" and labels is None else ""
            raise ValueError(
                f'a loss with candidates="{candidates}" wants a dataset of {wanted}; got {number}{and_labels}'
            )

    def get_config_dict(self) -> dict[str, Any]:
        """Settings of the loss for the model card: numbers, strings, lists and dicts."""
        values = {name: _plain(value) for name, value in self.loss.settings().items()}
        return {"loss": type(self.loss).__name__, **values, "gather_across_devices": self.loss.gather}

    @property
    def citation(self) -> str:
        """BibTeX entry for the model card; other losses than WEINCE have none, and the card leaves them out."""
        if not isinstance(self.loss, weince.WeinceLoss):
            raise AttributeError(f"no citation for {type(self.loss).__name__}")
        return CITATION


class CachedLossAdapter(CachedLossMixin, LossAdapter):
    """:class:`LossAdapter` with cached gradients, for batches whose activations do not fit into memory.

    Each column is embedded in mini-batches without a graph, and the loss is computed on the whole batch. Then each
    mini-batch is embedded again, with the same dropout, to backpropagate its part of the gradient. The gradient is
    that of the plain loss; the cost is one more forward pass.

    Args:
        model: The ``SentenceTransformer`` to train.
        loss: As in :class:`LossAdapter`, without learned parameters.
        mini_batch_size: Rows to embed at a time.
        mini_batch_num_tokens: Tokens to embed at a time, instead of rows.
        show_progress_bar: Show a bar of the mini-batches.

    Examples:
        >>> from torch import nn
        >>> from weince import DCLLoss
        >>> from weince.integrations.sentence_transformers import CachedLossAdapter
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> loss = CachedLossAdapter(model, DCLLoss(0.05, candidates="cross"), mini_batch_size=64)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: weince.ContrastiveLoss,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__(model, loss)
        sizes = {"mini_batch_size": mini_batch_size, "mini_batch_num_tokens": mini_batch_num_tokens}
        for name, size in sizes.items():
            optional = name == "mini_batch_num_tokens"
            if not (optional and size is None) and (type(size) is not int or size < 1):
                raise ValueError(f"{name} must be an int of at least 1; got {size!r}")
        if has_static_embedding_input(model):
            raise ValueError(
                "a model of static embeddings cannot be embedded in mini-batches; take the loss without cache"
            )
        learned = [name for name, value in loss.named_parameters() if value.requires_grad]
        if learned:
            # They would get their gradient in the forward pass, without the scaling of the model's gradient.
            raise ValueError(
                f"the cached loss takes numbers, not learned parameters; got a learned {', '.join(learned)}: make "
                "the loss with numbers (SigLIPLoss with learn=False), or take the loss without cache"
            )
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the tokens of each column; ``backward()`` embeds them again."""
        columns = list(sentence_features)
        self._check_columns(len(columns), labels)
        return self.forward_cached(columns, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss, given the embedded mini-batches of each column; with ``with_backward``, also their gradients."""
        value = self.compute_loss_from_embeddings([joined(parts) for parts in reps], labels)
        if not with_backward:
            return value
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def get_config_dict(self) -> dict[str, Any]:
        """Settings of the loss for the model card."""
        sizes = {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }
        return {**super().get_config_dict(), **sizes}


class WeinceLoss(LossAdapter):
    """WEINCE for ``SentenceTransformerTrainer``, drop-in for ``MultipleNegativesRankingLoss``.

    It is the preset ``released``, WEINCE as in the authors' code. For Algorithm 1 of the paper use
    ``LossAdapter(model, weince.WeinceLoss.paper(0.05, candidates="cross"))``.

    Args:
        model: The ``SentenceTransformer`` to train.
        temperature: ``1 / scale`` of ``MultipleNegativesRankingLoss``; a number or an ``nn.Parameter``.
        gather_across_devices: Contrast with the candidates of all devices.
        **options: As in :class:`weince.WeinceLoss`; ``candidates`` defaults to ``"cross"``.

    Examples:
        >>> from torch import nn
        >>> from weince.integrations.sentence_transformers import WeinceLoss
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> loss = WeinceLoss(model, temperature=0.05)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: Scalar = 0.05,
        gather_across_devices: bool = False,
        **options: Unpack[WeinceOptions],
    ) -> None:
        super().__init__(model, _weince(temperature, gather_across_devices, options))


class CachedWeinceLoss(CachedLossAdapter):
    """:class:`WeinceLoss` in mini-batches, drop-in for ``CachedMultipleNegativesRankingLoss``.

    Args:
        model: The ``SentenceTransformer`` to train.
        temperature: ``1 / scale`` of ``CachedMultipleNegativesRankingLoss``.
        mini_batch_size: Rows to embed at a time.
        mini_batch_num_tokens: Tokens to embed at a time, instead of rows.
        show_progress_bar: Show a bar of the mini-batches.
        gather_across_devices: Contrast with the candidates of all devices.
        **options: As in :class:`WeinceLoss`.

    Examples:
        >>> from torch import nn
        >>> from weince.integrations.sentence_transformers import CachedWeinceLoss
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> loss = CachedWeinceLoss(model, temperature=0.05, mini_batch_size=64)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 0.05,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        gather_across_devices: bool = False,
        **options: Unpack[WeinceOptions],
    ) -> None:
        super().__init__(
            model,
            _weince(temperature, gather_across_devices, options),
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=mini_batch_num_tokens,
            show_progress_bar=show_progress_bar,
        )


def load_model(model: str | Path, *, device: str | None = None) -> SentenceTransformer:
    """Load a ``SentenceTransformer`` from a folder, without network access, or by its name on the hub.

    Raises:
        OSError: No such folder, no model in it, no such name, or no network; the message says which in one line.

    Examples:
        >>> from weince.integrations.sentence_transformers import load_model
        >>> model = load_model("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> load_model("./missing")
        Traceback (most recent call last):
        ...
        FileNotFoundError: no model folder ./missing
    """
    name, folder = str(model), Path(model).is_dir()
    if not folder and (isinstance(model, Path) or Path(name).is_absolute() or name.startswith((".", "~"))):
        raise FileNotFoundError(f"no model folder {name}")
    local = only_here(name)
    try:
        return SentenceTransformer(name, device=device, local_files_only=local)
    except Exception as error:  # the types vary between versions
        raise cannot_load(name, local, error) from error


def _weince(temperature: Scalar, gather: bool, options: WeinceOptions) -> weince.WeinceLoss:
    if "scale" in options:
        raise TypeError("scale is spelled temperature here, which is 1 / scale: 0.05 for a scale of 20")
    options.setdefault("candidates", "cross")
    options["gather"] = gather
    return weince.WeinceLoss(temperature, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, TailConfig):
        return asdict(value)
    return value if value is None or isinstance(value, int | float | str) else repr(value)
