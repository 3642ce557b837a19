"""Statistics of score tails: arrays in, frozen dataclasses out. xi < 0 always means a bounded tail."""

from weince.evt.batch_tail import BatchXi, NegativeCosines, xi_over_batches
from weince.evt.gpd import GPDFit, fit_gpd
from weince.evt.link_fit import LinkFit, fit_link
from weince.evt.link_rivals import LinkRivals, VaryingLink, link_rivals
from weince.evt.link_test import Gain, LinkBank, LinkTest, link_bank, link_test

__all__ = [
    "BatchXi",
    "GPDFit",
    "Gain",
    "LinkBank",
    "LinkFit",
    "LinkRivals",
    "LinkTest",
    "NegativeCosines",
    "VaryingLink",
    "fit_gpd",
    "fit_link",
    "link_bank",
    "link_rivals",
    "link_test",
    "xi_over_batches",
]
