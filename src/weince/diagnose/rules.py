"""The thresholds of the verdicts, and the rules in words."""

from dataclasses import dataclass

from weince.evt.link_fit import FEW_BEATEN
from weince.scores import CROWD

NEAR = 1e-3
"""Two rows are twins if their shortfall is at most this."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the verdicts. They are conventions, not laws; the page prints them.

    Attributes:
        worth: Smallest held-out gain, in nats per anchor, that makes a change worth trying: 0.02 makes the
            positive 2 % likelier.
        alpha: Level that both p-values of the link test must reach.
        crowded: Largest share of crowded embeddings at which the link test is worth reading, beyond the share that
            chance makes crowded in few dimensions.
        beaten: Smallest number of fitted positives that must be beaten (a negative has a higher score) for a verdict.
        gap: Largest excess of the mean cosine within views over that across views at which rows of one view should
            compete with each other.
        shared: Largest mean cosine of negatives at which embeddings are not said to share one direction.
    """

    worth: float = 0.02
    alpha: float = 0.05
    crowded: float = 0.05
    beaten: int = FEW_BEATEN
    gap: float = 0.05
    shared: float = 0.5

    @property
    def lines(self) -> tuple[str, ...]:
        """The rules, one sentence each."""
        return (
            f"If more than {100 * self.crowded:g} % of the embeddings have one of another item within a shortfall of "
            f"{CROWD:g} in their batch, the advice is to look at these first, whatever the link test says. In 6 "
            "dimensions or fewer, the share to expect if embeddings were spread evenly is subtracted.",
            f"If more than {100 * self.crowded:g} % of the queries or of the documents have a twin in the whole file "
            f"(a row of another id within a shortfall of {NEAR:g}), the advice is to tell these apart first. Exact "
            "twins do not compete in this diagnosis.",
            f"If fewer than {self.beaten} of the fitted positives are beaten (a negative has a higher score), larger "
            "batches are tried, up to all pairs for the temperature. If that does not help, none is advised.",
            f"Another link is advised only if its held-out gain over softmax at its best temperature is at "
            f"least {self.worth:g} nats per anchor, the 95 % interval of the gain lies above 0, and both "
            f"p-values (likelihood ratio by parametric bootstrap, clustered t) are at most {self.alpha:g}.",
            "If your temperature is known and costs more than the link would gain, the temperature comes first.",
            "Pairs or anchors of different difficulty may explain a gain: softmax then has a temperature that "
            "varies from pair to pair, or from anchor to anchor. A bounded tail explains more only if the blend "
            f"gains at least {self.worth:g} nats over the former, adds at least {self.worth:g} nats to the latter, "
            "and both intervals lie above 0. Different difficulty explains more if pairs gain as much over the "
            "blend, or anchors add as much to it, with the interval above 0.",
            f"A gain of at least {self.worth:g} nats that misses one of the other conditions is called "
            f"unclear.",
            f"Another temperature is advised if softmax at the temperature you trained with (the option "
            f"temperature) loses more than {self.worth:g} nats per anchor against its best temperature.",
            f"No advice is given when softmax at its best temperature beats a random pick by less than "
            f"{self.worth:g} nats per anchor: the two rows of a pair then have nothing to do with each other.",
            f"If the mean cosine within views exceeds that of negatives across views by more than {self.gap:g}, a "
            "note says that the two views may come from two encoders, which need the option candidates.",
            f"Else, if the mean cosine of negatives is above {self.shared:g}, a note says that all embeddings share "
            "one direction.",
            "A tail is said to look bounded if the whole 95 % interval of ξ (over batches) lies below 0, "
            "heavy if it lies above 0; otherwise it is undecided.",
        )


THRESHOLDS = Thresholds()
