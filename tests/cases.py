"""All losses with their formulas in ``reference.py``, and all layouts on which the engines are compared."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import reference
import torch
from reference import Anchor
from torch import Tensor, nn

from weince import (
    AlignUniformLoss,
    BlendLink,
    ContrastiveLoss,
    DCLLoss,
    DCLWLoss,
    DebiasedLoss,
    DHELLoss,
    FocalLoss,
    FunctionLink,
    HCLLoss,
    InfoNCELoss,
    KLBallLoss,
    LinkLoss,
    LogSumExp,
    LSEPairLoss,
    MWLoss,
    PowerLink,
    RINCELoss,
    SigLIPLoss,
    SoftmaxLink,
    SoftplusSum,
    SumMargLHLoss,
    SupConLoss,
    TailConfig,
    TemperatureFreeLoss,
    TemperatureMixtureLoss,
    WeibitLoss,
    WeinceLoss,
)
from weince.losses.weince import RELEASED_TAIL

Number = Callable[[float], Any]
"""Makes a parameter of a loss: the float itself, or a learned ``nn.Parameter``."""


def fixed(value: float) -> float:
    return value


def learned(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


class Mine(ContrastiveLoss):
    """A user-defined loss: three sums, one over the three hardest negatives, with a learned parameter."""

    def __init__(self, steepness: Any, **options: Any) -> None:
        super().__init__(**options)
        self.steepness = steepness

    def sums(self, batch: Any) -> list[Any]:
        steepness = torch.as_tensor(self.steepness, dtype=torch.float64)
        cubic = FunctionLink(lambda s, k: k * s + s**3, k=steepness)
        return [LogSumExp(cubic, hardest=3), LogSumExp(SoftmaxLink(0.4)), SoftplusSum(cubic)]

    def combine(self, hardest: Any, every: Any, softplus: Tensor) -> Tensor:
        return hardest.value - hardest.positive + 0.5 * every.cross_entropy() + 0.1 * softplus


def mine(batch: list[Anchor], steepness: Tensor) -> list[Tensor]:
    def cubic(s: Tensor) -> Tensor:
        return steepness * s + s**3

    def loss(anchor: Anchor) -> Tensor:
        hardest = reference.hardest_of(anchor.negatives, 3)
        first = torch.logsumexp(cubic(hardest), 0) - cubic(anchor.positives).mean()
        second = reference.cross_entropy(anchor.positives, anchor.negatives, lambda s: s / 0.4)
        return first + 0.5 * second + 0.1 * torch.log1p(cubic(anchor.negatives).exp()).sum()

    return reference.each(batch, loss)


class Case(NamedTuple):
    """A loss: its factory for fixed or learned parameters, and its formula, which takes them by name."""

    make: Callable[..., ContrastiveLoss]
    formula: Callable[..., list[Tensor]]
    parameters: Mapping[str, float] = MappingProxyType({})
    labels: bool = True
    """Whether the loss is defined for several positives."""
    views_only: bool = False


def _released(batch: list[Anchor], temperature: Tensor, remembers: reference.Released) -> list[Tensor]:
    return remembers(batch, temperature, RELEASED_TAIL, 0.5, 0.5)


def _with_terms(batch: list[Anchor], temperature: Tensor, remembers: reference.Released) -> list[Tensor]:
    return remembers.with_terms(batch, reference.info_nce(batch, temperature), temperature, 0.3, 0.7)


def _paper(tail: TailConfig) -> Callable[..., list[Tensor]]:
    return lambda batch, temperature: reference.weince_losses(batch, temperature, tail)[0]


SMALL = TailConfig(k=6, kappa_rho=3.0)
SMALL_NEGATIVES_ONLY = TailConfig(k=6, kappa_rho=3.0, positive="softmax")
TAU = {"temperature": 0.3}
LOG_SCALE = float(-torch.tensor(0.3).log())  # a number of float32, as the parameter is

CASES: dict[str, Case] = {
    "InfoNCE": Case(lambda p, **o: InfoNCELoss(p(0.3), **o), reference.info_nce, TAU),
    "InfoNCE with terms": Case(
        lambda p, **o: WeinceLoss(p(0.3), tail=None, softmax_term=0.3, shortfall_term=0.7, **o),
        _with_terms,
        TAU,
    ),
    "InfoNCE, hardness": Case(
        lambda p, **o: InfoNCELoss(p(0.3), hardness=2.0, **o),
        lambda batch, temperature: reference.harder(batch, temperature, 2.0),
        TAU,
    ),
    "InfoNCE, learn_temperature": Case(
        lambda p, **o: InfoNCELoss(math.exp(-LOG_SCALE), learn_temperature=p is learned, **o),
        lambda batch, log_scale: reference.info_nce(batch, (-log_scale).exp()),
        {"log_scale": LOG_SCALE},
    ),
    "InfoNCE, each positive alone": Case(
        lambda p, **o: InfoNCELoss(p(0.3), other_positives=False, **o), reference.each_alone, TAU
    ),
    "MW": Case(lambda p, **o: MWLoss(p(0.3), **o), reference.mw, TAU, labels=False),
    "LSEPair": Case(lambda p, **o: LSEPairLoss(p(0.3), **o), reference.lse_pair, TAU),
    "SumMargLH": Case(lambda p, **o: SumMargLHLoss(p(0.3), **o), reference.sum_marg_lh, TAU),
    "Focal": Case(
        lambda p, **o: FocalLoss(p(0.3), gamma=1.5, **o),
        lambda batch, temperature: reference.focal(batch, temperature, 1.5),
        TAU,
        labels=False,
    ),
    "SupCon": Case(lambda p, **o: SupConLoss(p(0.3), **o), reference.info_nce, TAU),
    "DCL": Case(lambda p, **o: DCLLoss(p(0.3), **o), reference.dcl, TAU),
    "DCLW": Case(
        lambda p, **o: DCLWLoss(p(0.3), sigma=0.4, **o),
        lambda batch, temperature: reference.dclw(batch, temperature, 0.4),
        TAU,
        labels=False,
    ),
    "HCL": Case(
        lambda p, **o: HCLLoss(p(0.3), hardness=0.7, false_negatives=0.2, **o),
        lambda batch, temperature: reference.hcl(batch, temperature, 0.7, 0.2),
        TAU,
        labels=False,
    ),
    "Debiased": Case(
        lambda p, **o: DebiasedLoss(p(0.5), **o),
        lambda batch, temperature: reference.hcl(batch, temperature, 0.0, 0.1),
        {"temperature": 0.5},
        labels=False,
    ),
    "DHEL": Case(lambda p, **o: DHELLoss(p(0.3), **o), reference.dhel, TAU, labels=False, views_only=True),
    "RINCE": Case(
        lambda p, **o: RINCELoss(p(0.3), q=0.3, weight=0.05, **o),
        lambda batch, temperature: reference.rince(batch, temperature, 0.3, 0.05),
        TAU,
        labels=False,
    ),
    "AlignUniform": Case(
        lambda p, **o: AlignUniformLoss(weight=0.7, spread=1.5, **o),
        lambda batch: reference.align_uniform(batch, 0.7, 1.5),
    ),
    "SigLIP": Case(
        lambda p, **o: SigLIPLoss(scale=5.0, bias=-2.0, learn=p is learned, **o),
        lambda batch, log_scale, bias: reference.siglip(batch, log_scale, bias),
        {"log_scale": float(torch.tensor(5.0).log()), "bias": -2.0},
    ),
    "KLBall": Case(  # about half of the anchors of random rows are at this bound
        lambda p, **o: KLBallLoss(0.4, min_temperature=0.3, **o),
        lambda batch: reference.kl_ball(batch, 0.4, 0.3),
    ),
    "Weibit": Case(lambda p, **o: WeibitLoss(p(2.0), **o), reference.weibit, {"beta": 2.0}),
    "Weibit, endpoint 1.5": Case(
        lambda p, **o: WeibitLoss(p(2.0), 1.5, **o),
        lambda batch, beta: reference.weibit(batch, beta, 1.5),
        {"beta": 2.0},
    ),
    "TemperatureFree": Case(lambda p, **o: TemperatureFreeLoss(**o), reference.temperature_free),
    "TemperatureMixture": Case(
        lambda p, **o: TemperatureMixtureLoss(p(0.3), spread=0.7, nodes=4, **o),
        lambda batch, temperature: reference.mixture(batch, temperature, 0.7, 4),
        TAU,
        labels=False,
    ),
    "released": Case(lambda p, **o: WeinceLoss(p(0.3), **o), _released, TAU),
    "paper": Case(lambda p, **o: WeinceLoss.paper(p(0.3), tail=SMALL, **o), _paper(SMALL), TAU),
    "negatives only": Case(
        lambda p, **o: WeinceLoss.negatives_only(p(0.3), tail=SMALL_NEGATIVES_ONLY, **o),
        _paper(SMALL_NEGATIVES_ONLY),
        TAU,
    ),
    "a function": Case(
        lambda p, **o: LinkLoss(lambda s: 5 * s + s**3, **o),
        lambda batch: reference.with_logit(batch, lambda s: 5 * s + s**3),
    ),
    "a function that learns": Case(
        lambda p, **o: LinkLoss(
            FunctionLink(lambda s, k: k * torch.sinh(s), k=torch.as_tensor(p(4.0), dtype=torch.float64)), **o
        ),
        lambda batch, k: reference.with_logit(batch, lambda s: k * torch.sinh(s)),
        {"k": 4.0},
    ),
    "power": Case(lambda p, **o: LinkLoss(PowerLink(p(4.0)), **o), reference.power, {"alpha": 4.0}),
    "blend that learns": Case(
        lambda p, **o: LinkLoss(BlendLink(p(0.6), p(2.0), p(0.3)), **o),
        lambda batch, lam, beta, temperature: reference.with_logit(
            batch, lambda s: reference.blend(s, lam, beta, temperature, TailConfig())
        ),
        {"lam": 0.6, "beta": 2.0, "temperature": 0.3},
    ),
    "one's own": Case(lambda p, **o: Mine(p(3.0), **o), mine, {"steepness": 3.0}),
}


class Layout(NamedTuple):
    """Arguments of a loss, its candidates, and for every problem the anchors, candidates and roles."""

    arguments: dict[str, Tensor]
    candidates: str
    problems: Sequence[tuple[Tensor, Tensor, list[list[str]]]]

    @property
    def leaves(self) -> list[Tensor]:
        return [value for key, value in self.arguments.items() if key in ("z_i", "z_j", "negatives")]


def embeddings(rows: int, seed: int, d: int = 7) -> Tensor:
    """Clustered rows of varying length; their shortfalls span orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, d, generator=generator, dtype=torch.float64)
    pick = torch.randint(3, (rows,), generator=generator)
    noise = 0.3 * torch.randn(rows, d, generator=generator, dtype=torch.float64)
    length = torch.rand(rows, 1, generator=generator, dtype=torch.float64) + 0.1
    return ((centres[pick] + noise) * length).requires_grad_()


N, EXTRA = 11, 5
IDS = torch.tensor([-1, 1, 2, 3, 4, 5, 6, 7, 8, 1, -1])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 1])  # label 3 occurs once


def layout(name: str) -> Layout:
    """One of :data:`LAYOUTS`, with fresh leaves."""
    a, b, extra = embeddings(N, 1), embeddings(N, 2), embeddings(EXTRA, 3)
    both, further = torch.cat([a, b]), torch.cat([b, extra])
    ignore = torch.rand(2 * N, 2 * N, generator=torch.Generator().manual_seed(4)) < 0.3
    square, wide = ignore[:N, :N], ignore[:N, : N + EXTRA]
    views, cross, more = (
        reference.roles_views(N),
        reference.roles_cross(N, 0),
        reference.roles_cross(N, EXTRA),
    )
    ids, ids_of_all = IDS.tolist(), torch.cat([IDS, IDS[:EXTRA]])
    pairs, with_negatives = {"z_i": a, "z_j": b}, {"z_i": a, "z_j": b, "negatives": extra}
    ignoring, labelled = reference.ignoring, reference.roles_labels
    made = {
        "views": lambda: (pairs, [(both, both, views)]),
        "views, ids": lambda: (pairs | {"ids": IDS}, [(both, both, reference.roles_views(N, ids))]),
        "views, ignore": lambda: (pairs | {"ignore": ignore}, [(both, both, ignoring(views, ignore))]),
        "cross": lambda: (pairs, [(a, b, cross)]),
        "cross, negatives": lambda: (with_negatives, [(a, further, more)]),
        "cross, negatives, ids": lambda: (
            with_negatives | {"ids": IDS},
            [(a, further, reference.roles_cross(N, EXTRA, ids))],
        ),
        "cross, ids of negatives": lambda: (
            with_negatives | {"ids": ids_of_all},
            [(a, further, reference.roles_cross(N, EXTRA, ids_of_all.tolist()))],
        ),
        "cross, negatives, ignore": lambda: (
            with_negatives | {"ignore": wide},
            [(a, further, ignoring(more, wide))],
        ),
        "clip": lambda: (
            pairs | {"ignore": square},
            [(a, b, ignoring(cross, square)), (b, a, ignoring(cross, square.T))],
        ),
        "clip, ids": lambda: (
            pairs | {"ids": IDS},
            [(x, y, reference.roles_cross(N, 0, ids)) for x, y in ((a, b), (b, a))],
        ),
        "labels": lambda: ({"z_i": a, "labels": LABELS}, [(a, a, labelled(LABELS.tolist()))]),
        "labels, ignore": lambda: (
            {"z_i": a, "labels": LABELS, "ignore": square},
            [(a, a, ignoring(labelled(LABELS.tolist()), square))],
        ),
        "labels, two views, ids": lambda: (
            pairs | {"labels": LABELS, "ids": IDS},
            [(both, both, labelled(LABELS.tolist() * 2, ids * 2))],
        ),
    }
    arguments, problems = made[name]()
    return Layout(arguments, name.split(",")[0], problems)


LAYOUTS = [
    "views", "views, ids", "views, ignore", "cross", "cross, negatives", "cross, negatives, ids",
    "cross, ids of negatives", "cross, negatives, ignore", "clip", "clip, ids", "labels", "labels, ignore",
    "labels, two views, ids",
]  # fmt: skip


def served(case: Case) -> list[str]:
    """Layouts for which the loss is defined."""
    return [
        name
        for name in LAYOUTS
        if (case.labels or not name.startswith("labels"))
        and (not case.views_only or name.startswith("views"))
    ]


class Wanted(NamedTuple):
    """Results of a formula: one loss per anchor, their mean, and the parameters as leaves."""

    each: Tensor
    mean: Tensor
    parameters: list[Tensor]


def by_formula(case: Case, where: Layout) -> Wanted:
    parameters = {name: learned(value) for name, value in case.parameters.items()}
    options = dict(parameters)
    if case.formula in (_released, _with_terms):
        options["remembers"] = reference.Released()  # type: ignore[assignment]
    losses, counted = [], 0
    for problem in where.problems:
        batch = reference.scored(*problem)
        losses += case.formula(batch, **options)
        counted += sum(len(anchor.positives) > 0 for anchor in batch)
    return Wanted(torch.stack(losses), torch.stack(losses).sum() / counted, list(parameters.values()))
