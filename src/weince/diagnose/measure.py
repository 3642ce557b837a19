"""Run all diagnostics of `weince.evt` on one model's paired embeddings.

Sign convention: xi < 0 is a bounded (Weibull) tail; scipy's ``genpareto`` has ``c = xi``; the endpoint is
``threshold - sigma / xi``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import betainc

from weince import evt
from weince.diagnose.bank import Bank, anchors_kept, build_bank, count_beaten, larger_sizes, plan, view_gap
from weince.diagnose.reading import InputError, Pairs
from weince.diagnose.rules import THRESHOLDS
from weince.diagnose.settings import Settings
from weince.evt import choice
from weince.evt.arrays import Floats
from weince.evt.gpd import FEWEST_EXCESSES, exceed
from weince.evt.link_test import Competing, shape_of
from weince.scores import CROWD

Tell = Callable[[str], None]

STAGES = (
    "link test", "tail", "thresholds", "fit of the tail", "rivals", "curves", "ablations", "risk", "anchors"
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tail:
    """The tail of the negative cosines; xi < 0 means bounded."""

    n_scores: int
    xi: evt.BatchXi
    exponential: evt.ExponentialFit
    capped: evt.CappedFit | None  # None when some negatives reach the cap
    fit_test: evt.GoodnessOfFit
    curves: evt.TailCurves
    stability: evt.ThresholdStability
    residual_life: evt.MeanResidualLife


@dataclass(frozen=True, eq=False)
class Curves:
    """Held-out likelihood around the fits; arrays of shape (points,).

    Temperatures are judged on all batches if no positive of the held-out ones is beaten.

    Attributes:
        lams: Weights of the shortfall.
        lam_gain: Gain over softmax with lam fixed and the temperature refitted, nats per anchor.
        taus: Temperatures of softmax.
        tau_loss: What softmax loses at these compared with its fitted temperature, nats per anchor.
        tau_range: Temperatures at which it loses at most `THRESHOLDS.worth`.
        current_loss: The same loss at the temperature the model was trained with, or None.
        beta: Exponent of the pure shortfall link, fitted.
        over_chance: What softmax gains over picking a candidate at random, nats per anchor.
    """

    lams: Floats
    lam_gain: Floats
    taus: Floats
    tau_loss: Floats
    tau_range: tuple[float, float]
    current_loss: float | None
    beta: float
    over_chance: float


Points = tuple[evt.AblationPoint, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything measured on one model. Fields that need a fitted link are None when no finite fit exists.

    ``hard`` and ``pool`` are the ablations of the negatives; ``hard_drawn`` and ``pool_drawn`` are the same with
    positives drawn from the fitted blend. ``tried`` lists smaller batch sizes at which too few positives were beaten,
    ``fitted`` and ``beaten`` count the positives in those that were used. ``gap`` is how far the mean cosine within
    views exceeds that across views, ``mean_cosine`` is that of the negatives. ``by_label`` and ``equal`` are those of
    `Pairs`, ``crowded`` is that of `Bank`. ``crowded_by_chance`` is the share to expect if the rows were spread
    evenly over the sphere.
    """

    name: str
    pairs: int
    dim: int
    batch_size: int
    batches: int
    tried: tuple[int, ...]
    fitted: int
    beaten: int
    notes: tuple[str, ...]
    tail: Tail
    link: evt.LinkTest
    rivals: evt.LinkRivals | None
    frechet: evt.FrechetAblation
    hard: Points
    pool: Points
    hard_drawn: Points | None
    pool_drawn: Points | None
    anchors: evt.AnchorTails
    comparison: evt.AnchorComparison
    curves: Curves | None
    risk: tuple[evt.RiskGradient, ...] | None
    gap: float
    mean_cosine: float
    crowded: float
    crowded_by_chance: float
    by_label: bool
    equal: bool


def _tail(bank: Bank, settings: Settings, tell: Tell) -> tuple[Tail, tuple[str, ...]]:
    x, batches = bank.negatives.scores, bank.negatives.batches
    seed, bootstraps = settings.seed, settings.tail_bootstraps
    tell("tail")
    highest = min(0.995, 1.0 - 30.0 / x.size)
    at_cap = int((x >= 1.0 - 1e-9).sum())
    if np.quantile(x, max(highest, settings.quantile)) >= 1.0 - 1e-9:
        raise ValueError(
            f"{100.0 * at_cap / x.size:.1f} % of the negative pairs have a cosine of 1, so their tail is one point: "
            "duplicates (remove them, or give them equal ids), or items that the encoder maps onto one point"
        )
    xi = evt.xi_over_batches(x, batches, quantile=settings.quantile, bootstraps=bootstraps, seed=seed)
    u = xi.fit.threshold
    notes: tuple[str, ...] = ()
    cap: float | None = 1.0
    if at_cap:
        cap = None
        notes = (
            f"Negative pairs with a cosine of 1: {at_cap}. Duplicates in the data are false negatives: remove "
            "them, or give them equal ids. If they are different items, the encoder maps them onto one point.",
        )
    tell("thresholds")
    levels = np.unique(np.quantile(x, np.linspace(0.90, highest, settings.points)).round(12))
    # Tied scores may leave fewer than ten, or only equal ones, above a high level.
    levels = np.array([v for v in levels if _has_tail(x[exceed(x, v)])] or [u])
    stability = evt.threshold_stability(x, levels)
    tell("fit of the tail")
    return (
        Tail(
            n_scores=x.size,
            xi=xi,
            exponential=evt.fit_exponential(x, u),
            capped=None if cap is None else evt.fit_capped(x, u, cap=cap),
            fit_test=evt.goodness_of_fit(x, u, bootstraps=bootstraps, seed=seed),
            curves=evt.tail_curves(x, u, cap=cap),
            stability=stability,
            residual_life=evt.mean_residual_life(x, levels),
        ),
        notes,
    )


def _has_tail(x: Floats) -> bool:
    """Whether a generalised Pareto distribution can be fitted to these scores."""
    return x.size >= FEWEST_EXCESSES and float(np.ptp(x)) > 1e-9


def _one_feature(choices: choice.Choices, lam: float) -> choice.Choices:
    """The blend with lam fixed, as a single feature: differences from the positive's features blend linearly."""
    mixed = (1.0 - lam) * choices.features[0] + lam * choices.features[1]
    return replace(choices, features=mixed[None], beaten=(mixed > 0.0).any(axis=1)[None])


def _curves(bank: Bank, link: evt.LinkTest, settings: Settings) -> Curves:
    choices = choice.read_choices(*bank.link)
    fitted, judged = (choices.take(np.array(which)) for which in (link.held_in, link.held_out))

    def held_out(one: choice.Choices, theta: Floats) -> float:
        return float(choice.batch_means(one, theta).mean())

    lams = np.linspace(0.0, 1.0, settings.points)
    values, theta = [], np.array([1.0 / link.tau0])
    for lam in lams:
        theta = choice.fit(_one_feature(fitted, float(lam)), theta).theta
        values.append(held_out(_one_feature(judged, float(lam)), theta))
    # Where no held-out positive is beaten, softmax loses nothing however low its temperature: judge on all batches.
    softmax = (judged if judged.beaten[0].any() else choices).using(0)
    best = held_out(softmax, np.array([1.0 / link.tau0]))

    def loss(tau: float) -> float:
        return best - held_out(softmax, np.array([1.0 / tau]))

    current = settings.temperature
    # The curve includes the temperature in use, so that its cost is visible.
    ends = [0.25 * link.tau0, 4.0 * link.tau0, *([] if current is None else [current])]
    taus = np.geomspace(min(ends), max(ends), 2 * settings.points - 1)
    return Curves(
        lams=lams,
        lam_gain=np.array(values) - values[0],
        taus=taus,
        tau_loss=np.array([loss(tau) for tau in taus]),
        tau_range=(_edge(loss, link.tau0, 0.25), _edge(loss, link.tau0, 4.0)),
        current_loss=None if current is None else loss(current),
        beta=float(theta[0]),
        over_chance=best - held_out(softmax, np.zeros(1)),
    )


def _edge(loss: Callable[[float], float], tau0: float, factor: float) -> float:
    """The temperature between tau0 and factor * tau0 (or beyond) at which softmax loses what is worth a change."""
    near, far = tau0, tau0 * factor
    for _ in range(8):
        if loss(far) > THRESHOLDS.worth:
            break
        near, far = far, far * factor
    for _ in range(20):
        middle = float(np.sqrt(near * far))
        near, far = (near, middle) if loss(middle) > THRESHOLDS.worth else (middle, far)
    return near


def _selections(bank: evt.LinkBank, bootstraps: int, seed: int) -> tuple[Points, Points]:
    """Ablations of the link: with growing numbers of the hardest negatives, and with growing pools."""
    available = int(np.isfinite(bank.scores).sum(axis=1).min()) - 1
    sizes = _sizes(available, (8, 16, 32, 64, 128, 256))
    kept = min(64, max(available // 4, 1))
    pools = _sizes(available, tuple(kept * 2**i for i in range(8)))
    return (
        evt.hard_negative_ablation(*bank, kept=sizes, pool=available, bootstraps=bootstraps, rng=seed),
        evt.pool_ablation(*bank, pools=pools, kept=kept, bootstraps=bootstraps, rng=seed),
    )


def _sizes(available: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The wanted sizes below 80 % of what is available, then all that is available."""
    return (*(k for k in wanted if k < 0.8 * available), available)


def _risk(pairs: Pairs, link: evt.LinkTest, beta: float, settings: Settings) -> tuple[evt.RiskGradient, ...]:
    """Risk and gradient with each link at its own best fit; the blend's parameters differ, hence a second call."""
    seed = settings.seed
    bank = build_bank(pairs, min(settings.risk_pairs, len(pairs.z_i)), 1, seed, settings.candidates).link
    fewest = int(np.isfinite(bank.scores).sum(axis=1).min()) - 1
    ks = _sizes(fewest, (16, 64, 256, 1024))[:4]
    alone = evt.risk_gradient(bank.scores, bank.positives, ks=ks, tau=link.tau0, beta=beta, rng=seed)
    mixed = evt.risk_gradient(
        bank.scores, bank.positives, ks=ks, tau=link.tau, beta=1.0 / link.tau, lam=link.lam, rng=seed
    )
    return tuple(replace(a, blend=b.blend) for a, b in zip(alone, mixed, strict=True))


def _negative_shortfalls(bank: evt.LinkBank) -> Floats:
    """Shortfalls of every anchor's negatives (anchors, candidates - 1), inf where there is no candidate."""
    d = 1.0 - choice.negatives_of(bank.scores, bank.positives)
    return np.where(np.isnan(d), np.inf, d)


def _anchors(bank: evt.LinkBank, settings: Settings) -> tuple[evt.AnchorTails, evt.AnchorComparison]:
    """Tail statistics as the loss would compute them, batch by batch, and the valid comparison."""
    d = _negative_shortfalls(bank)
    parts = [evt.anchor_tails(d[bank.batches == b]) for b in np.unique(bank.batches)]
    names = ("rho", "beta", "daic", "lam", "k")
    joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
    tails = evt.AnchorTails(**joined, rho0=float(np.mean([p.rho0 for p in parts])))
    return tails, evt.compare_anchor_tails(d, seed=settings.seed)


def _crowded_by_chance(bank: evt.LinkBank, dim: int, candidates: Competing) -> float:
    """Share of embeddings that an even spread over the sphere crowds: near 0 in more than 6 dimensions."""
    near = 0.5 * betainc((dim - 1) / 2.0, 0.5, 1.0 - (1.0 - CROWD) ** 2)  # share of the sphere within CROWD
    negatives = np.isfinite(bank.scores).sum(axis=1) - 1
    others = negatives if candidates == "views" else 2 * negatives  # both views of the other items
    return float((1.0 - (1.0 - near) ** others).mean())


def measure(pairs: Pairs, settings: Settings, *, tell: Tell = lambda stage: None) -> Measured:
    """Run every diagnostic on one model.

    Args:
        pairs: Its embeddings.
        settings: How much to compute.
        tell: Called with the name of each stage as it begins.
    """
    try:
        return _measure(pairs, settings, tell)
    except InputError:
        raise
    except ValueError as error:
        # Errors about degenerate scores do not name the model, so its name is added here.
        raise InputError(f"{pairs.name}: {error}") from error


class Tested(NamedTuple):
    """The link test and its batches, smaller sizes that were tried, and the counts of `count_beaten`."""

    bank: Bank
    link: evt.LinkTest
    batch_size: int
    batches: int
    tried: tuple[int, ...]
    fitted: int
    beaten: int
    notes: tuple[str, ...]


def _test_link(pairs: Pairs, settings: Settings) -> Tested:
    """Run the link test. If too few positives are beaten, try larger batches, unless the settings give a batch size.

    Copies of the anchors win in batches of any size.
    """
    size, count, notes = plan(pairs, settings)
    larger = larger_sizes(pairs, size) if settings.batch_size is None and not pairs.equal else []
    tried: tuple[int, ...] = ()
    while True:
        bank = build_bank(pairs, size, count, settings.seed, settings.candidates)
        fitted, beaten = count_beaten(bank.link, settings.seed)
        if beaten >= THRESHOLDS.beaten or not larger:
            break
        tried, size = (*tried, size), larger.pop(0)
        count = min(settings.batches, len(pairs.z_i) // size)
    link = evt.link_test(
        *bank.link, bootstraps=settings.bootstraps, null_draws=settings.null_draws, rng=settings.seed
    )
    if tried:
        sizes = " and of ".join(f"{x:,}" for x in tried)
        notes = (
            f"In batches of {sizes} pairs fewer than {THRESHOLDS.beaten} of the fitted positives are beaten, so "
            f"{count} batches of {size:,} were used.",
        )
    kept, (anchors, _) = anchors_kept(size, count, settings.candidates), shape_of(size, settings.candidates)
    if kept < anchors:
        notes += (
            f"Of the {anchors:,} anchors in a batch {kept:,} were drawn, each with all its candidates, so that time "
            "and memory stay bounded.",
        )
    return Tested(bank, link, size, count, tried, fitted, beaten, notes)


def _measure(pairs: Pairs, settings: Settings, tell: Tell) -> Measured:
    seed, bootstraps = settings.seed, settings.bootstraps
    tell("link test")
    bank, link, size, count, tried, fitted, beaten, notes = _test_link(pairs, settings)
    tail, more = _tail(bank, settings, tell)
    # There is no finite fit under perfect separation, or if the scores do not help at all.
    usable = not link.separated and np.isfinite(link.tau0) and np.isfinite(link.tau)
    tell("rivals")
    rivals = evt.link_rivals(*bank.link, bootstraps=bootstraps, rng=seed) if usable else None
    tell("curves")
    curves = _curves(bank, link, settings) if usable else None
    tell("ablations")
    hard, pool = _selections(bank.link, bootstraps, seed)
    hard_drawn = pool_drawn = None
    if usable:
        drawn = evt.draw_positives(bank.link.scores, link.lam, link.tau, rng=seed)
        hard_drawn, pool_drawn = _selections(bank.link._replace(positives=drawn), bootstraps, seed)
    frechet = evt.frechet_ablation(*bank.link, bootstraps=bootstraps, rng=seed)
    tell("risk")
    risk = None if curves is None else _risk(pairs, link, curves.beta, settings)
    tell("anchors")
    anchors, comparison = _anchors(bank.link, settings)
    return Measured(
        name=pairs.name,
        pairs=len(pairs.z_i),
        dim=pairs.z_i.shape[1],
        batch_size=size,
        batches=count,
        tried=tried,
        fitted=fitted,
        beaten=beaten,
        notes=pairs.notes + notes + more + link.notes,
        tail=tail,
        link=link,
        rivals=rivals,
        frechet=frechet,
        hard=hard,
        pool=pool,
        hard_drawn=hard_drawn,
        pool_drawn=pool_drawn,
        anchors=anchors,
        comparison=comparison,
        curves=curves,
        risk=risk,
        gap=view_gap(pairs),
        mean_cosine=float(bank.negatives.scores.mean()),
        crowded=bank.crowded,
        crowded_by_chance=_crowded_by_chance(bank.link, pairs.z_i.shape[1], settings.candidates),
        by_label=pairs.by_label,
        equal=pairs.equal,
    )
