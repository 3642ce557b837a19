"""Losses for the trainer of sentence-transformers, to replace its ``MultipleNegativesRankingLoss``.

    from weince.integrations.sentence_transformers import LossAdapter

    loss = LossAdapter(model, InfoNCELoss(0.05, candidates="cross"))  # was: MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

The columns are the same: query, positive, then any number of hard negatives. Every query of the batch competes for
its positive with all positives and all hard negatives of the batch, except equal texts. ``temperature`` is
``1 / scale`` of that loss.
"""

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.func import functional_call

import weince
from weince.distributed import average, is_spread
from weince.integrations.equal_texts import pair_ids
from weince.integrations.hub import cannot_load, only_here
from weince.layouts import TOWERS
from weince.parameters import check_choice
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

__all__ = ["CachedLossAdapter", "LossAdapter", "load_model"]

Features = dict[str, Any]
HardNegatives = Literal["shared", "own"]
LabelColumn = Literal["weights", "positives"]
OPTIONS = ("hard_negatives", "label_column", "mask_duplicates", "mini_batch_size", "mini_batch_num_tokens")


class Beside(NamedTuple):
    """What a batch brings along beside its embeddings: its label column, ids, and copies of learned parameters."""

    labels: Tensor | None = None
    ids: Tensor | None = None
    learned: dict[str, Tensor] | None = None


class LossAdapter(nn.Module):
    """Any loss of weince as a loss for ``SentenceTransformerTrainer``.

    The loss determines which columns the dataset must have:

    - ``candidates="cross"`` or ``"clip"``: query, positive and any number of hard negatives;
    - ``candidates="views"``: two columns of positives;
    - ``candidates="labels"``: one or two columns of sentences, and an integer label.

    A batch of one row without hard negatives, such as a small last batch, has nothing to contrast with: its loss and
    all gradients are 0, and a warning says so.

    Args:
        model: The ``SentenceTransformer`` to train.
        loss: A loss with ``reduction="mean"`` or ``"sum"``. Its ``gather`` includes the candidates of other devices.
        hard_negatives: ``"shared"``: the hard negatives of a row are candidates of all queries, as in
            ``MultipleNegativesRankingLoss``; ``"own"``: of the query of their row alone.
        label_column: What the column ``label`` or ``score`` of the dataset holds if the loss takes no labels: the
            ``"weights"`` of the rows in the mean, or integers that say which documents are ``"positives"`` of a
            query: those of rows with its label. None ignores it.
        mask_duplicates: Pairs that share a text, directly or through other pairs of the batch, are never negatives of
            each other, nor is a hard negative with such a text. Texts are compared by their tokens; columns of images
            and sounds are not compared.

    Examples:
        >>> from torch import nn
        >>> from weince import InfoNCELoss
        >>> from weince.integrations.sentence_transformers import LossAdapter
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> core = InfoNCELoss(0.03, candidates="cross", ignore_above=0.1)
        >>> loss = LossAdapter(model, core, hard_negatives="own")  # SentenceTransformerTrainer(loss=loss, ...)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: weince.ContrastiveLoss,
        *,
        hard_negatives: HardNegatives = "shared",
        label_column: LabelColumn | None = None,
        mask_duplicates: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a SentenceTransformer; got {type(model).__name__}")
        if not isinstance(loss, weince.ContrastiveLoss):
            raise TypeError(f"loss must be a loss of weince, like InfoNCELoss(); got {type(loss).__name__}")
        if loss.reduction == "none":
            raise ValueError('a trainer wants one number: reduction must be "mean" or "sum"; got "none"')
        check_choice("hard_negatives", hard_negatives, get_args(HardNegatives))
        if label_column is not None:
            check_choice("label_column", label_column, get_args(LabelColumn))
            fitting = {"weights": ("cross", "clip", "views"), "positives": TOWERS}[label_column]
            if loss.candidates not in fitting:
                raise ValueError(
                    f'label_column="{label_column}" goes with candidates {", ".join(fitting)}; got {loss.candidates}'
                )
        if not isinstance(mask_duplicates, bool):
            raise TypeError(f"mask_duplicates must be True or False; got {mask_duplicates!r}")
        self.model, self.loss = model, loss
        self.hard_negatives, self.label_column = hard_negatives, label_column
        self.mask_duplicates = mask_duplicates
        self._averages = False  # whether hooks average the gradients of the loss's own parameters

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the tokens of each column."""
        columns = list(sentence_features)
        beside = self._beside(columns, labels)
        return self.compute_loss_from_embeddings(embed_columns(self.model, columns), beside)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | Beside | None = None
    ) -> Tensor:
        """The loss of a batch, given the embeddings ``(n, d)`` of each column."""
        beside = labels if isinstance(labels, Beside) else Beside(labels)
        self._check_columns(len(embeddings), beside.labels)
        self.loss.train(self.model.training)  # the trainer puts only the model into evaluation mode
        if is_spread() and not self._averages:  # nor does it wrap the loss for several devices
            self._averages = True
            for parameter in self.loss.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(average)  # type: ignore[no-untyped-call]
        first, *others = embeddings
        if self._nothing_to_contrast(embeddings):
            warnings.warn(
                "a batch of one row has nothing to contrast with: its loss is 0; "
                "dataloader_drop_last=True leaves such a last batch out",
                stacklevel=2,
            )
            # With the parameters of the loss, so that their hooks meet those of the other devices.
            parameters = beside.learned.values() if beside.learned else self.loss.parameters()
            return sum((*(rows.sum() for rows in (*others, *parameters)),), first.sum()) * 0.0
        rows = tuple(embeddings[:2])
        value: Tensor = functional_call(
            self.loss, beside.learned or {}, rows, self._roles(embeddings, beside)
        )
        return value

    def _beside(self, columns: list[Features], labels: Tensor | None) -> Beside:
        """What the batch brings along. It is read first: modules may change the features while they embed."""
        self._check_columns(len(columns), labels)
        if not self.mask_duplicates or self.loss.candidates == "labels":
            return Beside(labels)
        spread = bool(self.loss.gather) and is_spread()
        return Beside(labels, pair_ids(columns, spread, by_row=self.hard_negatives == "own"))

    def _roles(self, embeddings: list[Tensor], beside: Beside) -> dict[str, Any]:
        """What the loss is called with, beside the rows of queries and documents."""
        hard, labels = embeddings[2:], beside.labels
        roles: dict[str, Any] = {} if beside.ids is None else {"ids": beside.ids}
        if self.loss.candidates == "labels":
            return {"labels": labels}
        if hard:
            roles["negatives"] = joined(hard)
            if self.hard_negatives == "own":
                roles["negatives"] = roles["negatives"].unflatten(0, (len(hard), -1)).transpose(0, 1)
        if self.label_column is None:
            return roles
        if labels is None:
            raise ValueError(
                f'label_column="{self.label_column}" wants a column label, labels, score or scores in the dataset; '
                "this one has none of them"
            )
        if self.label_column == "weights":
            roles["weights"] = labels if labels.is_floating_point() else labels.float()
        else:
            roles["labels"] = (labels, labels)
        return roles

    def _nothing_to_contrast(self, embeddings: list[Tensor]) -> bool:
        elsewhere = bool(self.loss.gather) and is_spread()  # other devices add candidates
        return len(embeddings[0]) == 1 and len(embeddings) <= 2 and not elsewhere

    def _check_columns(self, number: int, labels: Tensor | None) -> None:
        candidates = self.loss.candidates
        towers = ("2 columns or more: query, positive, hard negatives", number >= 2)
        wanted, right = {
            "cross": towers,
            "clip": towers,
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
        options = {name: getattr(self, name) for name in OPTIONS if hasattr(self, name)}
        return {
            "loss": type(self.loss).__name__,
            **values,
            **options,
            "gather_across_devices": self.loss.gather,
        }


class CachedLossAdapter(CachedLossMixin, LossAdapter):
    """:class:`LossAdapter` with cached gradients, for batches whose activations do not fit into memory.

    Each column is embedded in mini-batches without a graph, and the loss is computed on the whole batch. Then each
    mini-batch is embedded again, with the same dropout, to backpropagate its part of the gradient. The gradient is
    that of the plain loss; the cost is one more forward pass.

    Args:
        model: The ``SentenceTransformer`` to train.
        loss: As in :class:`LossAdapter`.
        mini_batch_size: Rows to embed at a time.
        mini_batch_num_tokens: Tokens to embed at a time, instead of rows.
        show_progress_bar: Show a bar of the mini-batches.
        **options: ``hard_negatives``, ``label_column`` and ``mask_duplicates``, as in :class:`LossAdapter`.

    Examples:
        >>> from torch import nn
        >>> from weince import InfoNCELoss
        >>> from weince.integrations.sentence_transformers import CachedLossAdapter
        >>> model = nn.Sequential(nn.Identity())  # yours: SentenceTransformer("bert-base-uncased")
        >>> core = InfoNCELoss(0.05, candidates="cross", learn_temperature=True)
        >>> loss = CachedLossAdapter(model, core, mini_batch_size=64)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: weince.ContrastiveLoss,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, loss, **options)
        tokens = 1 if mini_batch_num_tokens is None else mini_batch_num_tokens
        for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", tokens)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be an int of at least 1; got {size!r}")
        if has_static_embedding_input(model):
            raise ValueError(
                "a model of static embeddings cannot be embedded in mini-batches; take the loss without cache"
            )
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the tokens of each column; ``backward()`` embeds them again."""
        columns = list(sentence_features)
        parameters = {name: each for name, each in self.loss.named_parameters() if each.requires_grad}
        # The loss runs backward within this call. Copies of its parameters take their gradients there, since the
        # caller may scale the loss before it calls backward().
        copies = {name: each.detach().requires_grad_() for name, each in parameters.items()}
        beside = self._beside(columns, labels)._replace(learned=copies)
        value: Tensor = self.forward_cached(columns, beside)  # type: ignore[arg-type]
        for name, copy in copies.items():
            if copy.grad is not None:
                value = value + ((parameters[name] - copy.detach()) * copy.grad).sum()
        return value

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | Beside | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss, given the embedded mini-batches of each column; with ``with_backward``, also their gradients."""
        value = self.compute_loss_from_embeddings([joined(parts) for parts in reps], labels)
        if not with_backward:
            return value
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()


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


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, TailConfig):
        return asdict(value)
    return value if value is None or isinstance(value, int | float | str) else repr(value)
