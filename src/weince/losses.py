"""The losses as modules: thin holders of options over :mod:`weince.functional`.

>>> import torch
>>> loss = WeinceLoss(temperature=0.5)
>>> z_i, z_j = torch.randn(8, 16), torch.randn(8, 16)
>>> loss(z_i, z_j).shape
torch.Size([])
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, Self, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from weince import functional
from weince.candidates import Candidates, check_choice
from weince.distributed import Gather, check_gather
from weince.engines.choose import Engine, warn_once
from weince.functional import LossOutput, Reduction
from weince.links import Link, Scalar, ShortfallLink, SoftmaxLink
from weince.tail import TailConfig
from weince.terms import BatchShortfallLink, Term, WeinceLink, terms_of


class ModuleOptions(TypedDict, total=False):
    """Options that every loss module takes; see :class:`LinkLoss`."""

    candidates: Candidates
    extra: Sequence[Term]
    reduction: Reduction
    engine: Engine
    gather: Gather
    check_finite: bool | None


class WeinceOptions(ModuleOptions, total=False):
    """Options of :class:`WeinceLoss` beside the temperature."""

    tail: TailConfig


RELEASED_TAIL = TailConfig(beta=1.0, drop=0.05, soft_cap=False)


def released_terms(temperature: Scalar = 0.5) -> list[Term]:
    """The two extra terms of the authors' released code, to add to any loss as ``extra=``."""
    return [
        Term(SoftmaxLink(temperature), weight=0.5, hardest=50),
        Term(BatchShortfallLink(), weight=0.5, hardest=50),
    ]


class LinkLoss(nn.Module):
    """A contrastive loss under any link.

    Args:
        link: How a cosine becomes a logit, for example ``ShortfallLink(beta=4.0)``.
        candidates: ``"views"`` (SimCLR), ``"cross"`` (SimCSE, query and key), ``"clip"`` or ``"labels"`` (SupCon),
            see :func:`weince.candidates.contests`.
        extra: Further terms to add to the loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over the anchors.
        engine: ``"auto"``, ``"dense"``, ``"chunked"`` or ``"fused"``, see :func:`weince.engines.choose`.
        gather: Under several ranks, contrast with the candidates of all of them; ``"ring"`` without ever holding
            them all; see :mod:`weince.distributed`.
        check_finite: Raise on NaN or inf in the embeddings; by default only where that costs no wait (CPU).
    """

    link: Link
    extra: tuple[Term, ...]
    _looked = False  # whether the loss of a first batch with labels, ids or ignore was read

    def __init__(
        self,
        link: Link,
        *,
        candidates: Candidates = "views",
        extra: Sequence[Term] = (),
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: Gather = True,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__()
        check_choice("candidates", candidates, get_args(Candidates))
        check_choice("reduction", reduction, get_args(Reduction))
        check_choice("engine", engine, get_args(Engine))
        check_gather(gather, engine)
        self.candidates, self.reduction, self.engine = candidates, reduction, engine
        self.gather, self.check_finite = gather, check_finite
        self._learned: list[tuple[int, str, str]] = []  # term, field of its link, name in this module
        self._held: list[str] = []  # names in this module of what links learn or remember
        self._hold(link, extra)

    def __setattr__(self, name: str, value: Any) -> None:
        """Another link or other terms bring what they learn; what the former ones learnt is then gone."""
        if name == "link":
            self._hold(value, self._terms()[1:])
        elif name == "extra":
            self._hold(self._terms()[0].link, value)
        else:
            self._refuse_field(name, value)
            super().__setattr__(name, value)

    def _refuse_field(self, name: str, value: Any) -> None:
        """Raise if what is set here belongs to the link, which would not hear of it."""
        link = self.__dict__.get("link")
        own = [field.name for field in fields(link)] if is_dataclass(link) else []
        # What the subclass of a loss was made with it may keep under the same name.
        if name in own and name not in self._held and value is not getattr(link, name):
            raise AttributeError(
                f"{name} belongs to the link {link}: set link = {type(link).__name__}({name}=...), or make a new loss"
            )

    def _hold(self, link: Link, extra: Iterable[Term]) -> None:
        """Take the terms, and make what their links learn or remember part of this module."""
        terms = terms_of(link, extra)
        for name in self._held:
            delattr(self, name)
        self.__dict__.pop("link", None)
        held: dict[str, Any] = {"link": link, "extra": tuple(terms[1:])}
        for name, value in held.items():
            super().__setattr__(name, value)
        self._held, self._learned = [], []
        names: dict[int, str] = {}  # by id: a parameter that terms share is held once, and stays one
        for index, term in enumerate(terms):
            prefix = f"extra{index}_" if index else ""
            if isinstance(term.link, nn.Module):
                self.add_module(f"{prefix}link", term.link)
                self._held.append(f"{prefix}link")
            for field, value in term.link.tensors().items():
                if isinstance(value, nn.Parameter):
                    name = names.setdefault(id(value), prefix + field)
                    if name not in self._held:
                        self.register_parameter(name, value)
                        self._held.append(name)
                    self._learned.append((index, field, name))

    def _terms(self) -> list[Term]:
        """The terms with the parameters that this module holds now, which may have been swapped for others."""
        terms = [Term(self.link), *self.extra]
        for index, field, name in self._learned:
            link = terms[index].link.with_tensors({field: getattr(self, name)})
            terms[index] = terms[index]._replace(link=link)
        return terms

    def forward(
        self,
        z_i: Tensor,
        z_j: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        ids: Tensor | None = None,
        ignore: Tensor | None = None,
        return_stats: bool = False,
    ) -> Tensor | LossOutput:
        """The loss of a batch.

        Args:
            z_i: ``(n, d)`` embeddings of any floating dtype; they need not be normalised.
            z_j: ``(n, d)``, positives row by row. Optional with ``candidates="labels"``.
            labels: ``(n,)`` integers, for ``candidates="labels"``.
            negatives: ``(m, d)`` further negatives of every anchor, for ``candidates="cross"``.
            ids: ``(n,)`` integers (with ``negatives`` also ``(n + m,)``); rows with equal ids are never negatives
                of each other.
            ignore: boolean, anchors by candidates: pairs that are not negatives.
            return_stats: Return a :class:`LossOutput` with the tail statistics of each anchor.
        """
        first, *extra = self._terms()
        output = functional.link_loss(
            z_i,
            z_j,
            link=first.link,
            candidates=self.candidates,
            extra=extra,
            reduction=self.reduction,
            engine=self.engine,
            gather=self.gather,
            labels=labels,
            negatives=negatives,
            ids=ids,
            ignore=ignore,
            check_finite=self.check_finite,
            return_stats=return_stats,
        )
        loss = output.loss if isinstance(output, LossOutput) else output
        self._look(loss, labels=labels, ids=ids, ignore=ignore)
        return output

    def _look(self, loss: Tensor, **roles: Tensor | None) -> None:
        """Warn if the first batch has nothing to contrast: wrong labels are wrong from the start, and no later step
        has to wait for the device.
        """
        # Compiled code must not depend on what was read before; a fake tensor, as a meta one, has no value.
        if torch.compiler.is_compiling() or self._looked or loss.is_meta or type(loss) is not Tensor:
            return
        given = " and ".join(name for name, value in roles.items() if value is not None)
        if not given or (loss.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._looked = True
        if not loss.any():
            warn_once(
                f"weince: the loss of a batch is 0; it seems that its {given} "
                "leave no anchor a positive and a negative"
            )

    def extra_repr(self) -> str:
        try:
            link = self._terms()[0].link
        except ValueError:  # a learned value that left its range, which may be why somebody prints this
            link = self.link
        return f"{link}, candidates={self.candidates!r}, reduction={self.reduction!r}"


def _known(loss: type[LinkLoss], options: ModuleOptions) -> ModuleOptions:
    """The options as they are; raises in the name of the loss that was called if one is none of its."""
    for name in options:
        if name not in ModuleOptions.__annotations__:
            own = [parameter for parameter in signature(loss).parameters if parameter != "options"]
            takes = ", ".join([*own, *ModuleOptions.__annotations__])
            raise TypeError(f"{loss.__name__} has no option {name!r}; it takes {takes}")
    return options


class InfoNCELoss(LinkLoss):
    """InfoNCE (NT-Xent): softmax of ``s / temperature``. ``temperature`` may be an ``nn.Parameter``."""

    def __init__(self, temperature: Scalar = 0.5, **options: Unpack[ModuleOptions]) -> None:
        super().__init__(SoftmaxLink(temperature), **_known(InfoNCELoss, options))


class WeibitLoss(LinkLoss):
    """The shortfall link alone: softmax of ``-beta * log(endpoint - s)``."""

    def __init__(self, beta: Scalar = 1.0, endpoint: float = 1.0, **options: Unpack[ModuleOptions]) -> None:
        super().__init__(ShortfallLink(beta, endpoint), **_known(WeibitLoss, options))


class WeinceLoss(LinkLoss):
    """WEINCE: InfoNCE whose logits lean towards the shortfall link where an anchor's own tail asks for it.

    Args:
        temperature: Of the softmax part; a number or an ``nn.Parameter``.
        tail: How the tail is fitted and gated. The default is Algorithm 1.
        **options: As in :class:`LinkLoss`.
    """

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        tail: TailConfig = TailConfig(),
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__(WeinceLink(temperature, tail), **_known(WeinceLoss, options))

    @classmethod
    def paper(cls, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> Self:
        """Algorithm 1 of the paper, which is also the default."""
        return cls(temperature, **options)

    @classmethod
    def released(cls, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> Self:
        """What the authors' released code trains with: another gate, and two terms the paper does not mention.

        The blend has ``beta = 1`` and no ``eps`` inside its logarithm, and the fit drops the smallest shortfalls.
        Two cross-entropies over the positive and the 50 hardest negatives are added, each with weight 0.5: one
        with softmax logits, one with a shortfall link whose slope follows the batch. (The released fit also
        penalises slopes of the wrong sign. Sorted shortfalls never have one, so that part is not here.)
        """
        options.setdefault("tail", RELEASED_TAIL)
        options.setdefault("extra", released_terms(temperature))
        return cls(temperature, **options)
