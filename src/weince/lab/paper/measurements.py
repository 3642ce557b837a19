"""What the paper's figures need of one model, besides the measurements that its verdict rests on."""

from dataclasses import dataclass, replace

import numpy as np

from weince.diagnose.bank import Bank, build_bank
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.measure import Measured, Tell, highest_level
from weince.diagnose.reading import EmbeddedPairs
from weince.evt import LinkBank, LinkTest, choice
from weince.evt.arrays import Floats
from weince.evt.gpd import FEWEST_EXCESSES, exceed
from weince.lab.paper.ablations import (
    AblationPoint,
    FrechetAblation,
    frechet_ablation,
    hard_negative_ablation,
    pool_ablation,
)
from weince.lab.paper.anchors import AnchorComparison, AnchorTails, anchor_tails, compare_anchor_tails
from weince.lab.paper.cross_checks import CrossValidation, cross_validate
from weince.lab.paper.draws import draw_positives
from weince.lab.paper.pot import (
    CappedFit,
    ExponentialFit,
    GoodnessOfFit,
    MeanResidualLife,
    TailCurves,
    ThresholdStability,
    fit_capped,
    fit_exponential,
    goodness_of_fit,
    mean_residual_life,
    tail_curves,
    threshold_stability,
)
from weince.lab.paper.risk import RiskGradient, negatives_of, risk_gradient

STAGES = ("peaks over a threshold", "links", "ablations", "risk", "anchors")
Points = tuple[AblationPoint, ...]


@dataclass(frozen=True, eq=False)
class PeaksOverThreshold:
    """The tail of the negative cosines against other laws, and over thresholds; xi < 0 means bounded."""

    exponential: ExponentialFit
    capped: CappedFit | None  # None when some negatives reach the cap
    fit_test: GoodnessOfFit
    curves: TailCurves
    stability: ThresholdStability
    residual_life: MeanResidualLife


@dataclass(frozen=True, eq=False)
class BlendCurve:
    """Held-out gain over softmax with lam fixed and the temperature refitted, nats per anchor, (points,) each.

    ``beta`` is the fitted exponent of the pure shortfall link, lam = 1.
    """

    lams: Floats
    gain: Floats
    beta: float


@dataclass(frozen=True, eq=False)
class PaperMeasurements:
    """``hard`` and ``pool`` are the ablations of the negatives; ``hard_drawn`` and ``pool_drawn`` are the same with
    positives drawn from the fitted blend. What needs a fitted link is None when no finite fit exists.
    """

    pot: PeaksOverThreshold
    folds: CrossValidation
    blend: BlendCurve | None
    frechet: FrechetAblation
    hard: Points
    pool: Points
    hard_drawn: Points | None
    pool_drawn: Points | None
    anchors: AnchorTails
    comparison: AnchorComparison
    risk: tuple[RiskGradient, ...] | None


def measure_paper(
    pairs: EmbeddedPairs, bank: Bank, m: Measured, settings: DiagnosisSettings, tell: Tell
) -> PaperMeasurements:
    """Everything that the paper's figures show of a model."""
    seed, bootstraps, usable = settings.seed, settings.bootstraps, m.curves is not None
    tell("peaks over a threshold")
    pot = _peaks(bank, m, settings)
    tell("links")
    folds = cross_validate(*bank.link, rng=seed)
    blend = _blend_curve(bank.link, m.link, settings.points) if usable else None
    frechet = frechet_ablation(*bank.link, bootstraps=bootstraps, rng=seed)
    tell("ablations")
    hard, pool = _selections(bank.link, bootstraps, seed)
    hard_drawn = pool_drawn = None
    if usable:
        drawn = draw_positives(bank.link.scores, m.link.lam, m.link.tau, rng=seed)
        hard_drawn, pool_drawn = _selections(bank.link._replace(positives=drawn), bootstraps, seed)
    tell("risk")
    risk = None if blend is None else _risk(pairs, m.link, blend.beta, settings)
    tell("anchors")
    return PaperMeasurements(
        pot, folds, blend, frechet, hard, pool, hard_drawn, pool_drawn, *_anchors(bank.link, settings), risk
    )


def _peaks(bank: Bank, m: Measured, settings: DiagnosisSettings) -> PeaksOverThreshold:
    x, u = bank.negatives.scores, m.tail.xi.fit.threshold
    cap = None if (x >= 1.0 - 1e-9).any() else 1.0
    levels = np.unique(np.quantile(x, np.linspace(0.90, highest_level(x), settings.points)).round(12))
    # Tied scores may leave fewer than ten, or only equal ones, above a high level.
    levels = np.array([v for v in levels if _has_tail(x[exceed(x, v)])] or [u])
    return PeaksOverThreshold(
        exponential=fit_exponential(x, u),
        capped=None if cap is None else fit_capped(x, u, cap=cap),
        fit_test=goodness_of_fit(x, u, bootstraps=settings.tail_bootstraps, seed=settings.seed),
        curves=tail_curves(x, u, cap=cap),
        stability=threshold_stability(x, levels),
        residual_life=mean_residual_life(x, levels),
    )


def _has_tail(x: Floats) -> bool:
    """Whether a generalised Pareto distribution can be fitted to these scores."""
    return x.size >= FEWEST_EXCESSES and float(np.ptp(x)) > 1e-9


def _one_feature(choices: choice.Choices, lam: float) -> choice.Choices:
    """The blend with lam fixed, as a single feature: differences from the positive's features blend linearly."""
    mixed = (1.0 - lam) * choices.features[0] + lam * choices.features[1]
    return replace(choices, features=mixed[None], tops=mixed.max(axis=1)[None])


def _blend_curve(bank: LinkBank, link: LinkTest, points: int) -> BlendCurve:
    choices = choice.read_choices(*bank)
    fitted, judged = (choices.take(np.array(which)) for which in (link.held_in, link.held_out))
    lams = np.linspace(0.0, 1.0, points)
    values, theta = [], np.array([1.0 / link.tau0])
    for lam in lams:
        theta = choice.fit(_one_feature(fitted, float(lam)), theta).theta
        values.append(float(choice.batch_means(_one_feature(judged, float(lam)), theta).mean()))
    return BlendCurve(lams, np.array(values) - values[0], float(theta[0]))


def _selections(bank: LinkBank, bootstraps: int, seed: int) -> tuple[Points, Points]:
    """Ablations of the link: with growing numbers of the hardest negatives, and with growing pools."""
    available = int(np.isfinite(bank.scores).sum(axis=1).min()) - 1
    sizes = _sizes(available, (8, 16, 32, 64, 128, 256))
    kept = min(64, max(available // 4, 1))
    pools = _sizes(available, tuple(kept * 2**i for i in range(8)))
    return (
        hard_negative_ablation(*bank, kept=sizes, pool=available, bootstraps=bootstraps, rng=seed),
        pool_ablation(*bank, pools=pools, kept=kept, bootstraps=bootstraps, rng=seed),
    )


def _sizes(available: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The wanted sizes below 80 % of what is available, then all that is available."""
    return (*(k for k in wanted if k < 0.8 * available), available)


def _risk(
    pairs: EmbeddedPairs, link: LinkTest, beta: float, settings: DiagnosisSettings
) -> tuple[RiskGradient, ...]:
    """Risk and gradient with each link at its own best fit; the blend's parameters differ, hence a second call."""
    seed = settings.seed
    bank = build_bank(pairs, min(settings.risk_pairs, len(pairs.z_i)), 1, seed, settings.candidates).link
    fewest = int(np.isfinite(bank.scores).sum(axis=1).min()) - 1
    ks = _sizes(fewest, (16, 64, 256, 1024))[:4]
    alone = risk_gradient(bank.scores, bank.positives, ks=ks, tau=link.tau0, beta=beta, rng=seed)
    mixed = risk_gradient(
        bank.scores, bank.positives, ks=ks, tau=link.tau, beta=1.0 / link.tau, lam=link.lam, rng=seed
    )
    return tuple(replace(a, blend=b.blend) for a, b in zip(alone, mixed, strict=True))


def _negative_shortfalls(bank: LinkBank) -> Floats:
    """Shortfalls of every anchor's negatives (anchors, candidates - 1), inf where there is no candidate."""
    d = 1.0 - negatives_of(bank.scores, bank.positives)
    return np.where(np.isnan(d), np.inf, d)


def _anchors(bank: LinkBank, settings: DiagnosisSettings) -> tuple[AnchorTails, AnchorComparison]:
    """Tail statistics as the loss would compute them, batch by batch, and the valid comparison."""
    d = _negative_shortfalls(bank)
    parts = [anchor_tails(d[bank.batches == b]) for b in np.unique(bank.batches)]
    names = ("rho", "beta", "daic", "lam", "k")
    joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
    tails = AnchorTails(**joined, rho0=float(np.mean([p.rho0 for p in parts])))
    return tails, compare_anchor_tails(d, seed=settings.seed)
