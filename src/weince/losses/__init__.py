"""The losses, each as a module and as a function."""

from weince.losses.align_uniform import AlignUniformLoss, align_uniform_loss
from weince.losses.base import ContrastiveLoss, LossOutput
from weince.losses.dcl import DCLLoss, DCLWLoss, dcl_loss, dclw_loss
from weince.losses.dhel import DHELLoss, dhel_loss
from weince.losses.focal import FocalLoss, focal_loss
from weince.losses.hcl import DebiasedLoss, HCLLoss, debiased_loss, hcl_loss
from weince.losses.infonce import InfoNCELoss, info_nce_loss
from weince.losses.kl_ball import KLBallLoss, kl_ball_loss
from weince.losses.link import LinkLoss, link_loss
from weince.losses.lse_pair import LSEPairLoss, SumMargLHLoss, lse_pair_loss, sum_marg_lh_loss
from weince.losses.mixture import TemperatureMixtureLoss, temperature_mixture_loss
from weince.losses.mw import MWLoss, mw_loss
from weince.losses.rince import RINCELoss, rince_loss
from weince.losses.siglip import SigLIPLoss, siglip_loss
from weince.losses.supcon import SupConLoss, supcon_loss
from weince.losses.temperature_free import TemperatureFreeLoss, temperature_free_loss
from weince.losses.weibit import WeibitLoss, weibit_loss
from weince.losses.weince import WeinceLoss, weince_loss

__all__ = [
    "AlignUniformLoss",
    "ContrastiveLoss",
    "DCLLoss",
    "DCLWLoss",
    "DHELLoss",
    "DebiasedLoss",
    "FocalLoss",
    "HCLLoss",
    "InfoNCELoss",
    "KLBallLoss",
    "LSEPairLoss",
    "LinkLoss",
    "LossOutput",
    "MWLoss",
    "RINCELoss",
    "SigLIPLoss",
    "SumMargLHLoss",
    "SupConLoss",
    "TemperatureFreeLoss",
    "TemperatureMixtureLoss",
    "WeibitLoss",
    "WeinceLoss",
    "align_uniform_loss",
    "dcl_loss",
    "dclw_loss",
    "debiased_loss",
    "dhel_loss",
    "focal_loss",
    "hcl_loss",
    "info_nce_loss",
    "kl_ball_loss",
    "link_loss",
    "lse_pair_loss",
    "mw_loss",
    "rince_loss",
    "siglip_loss",
    "sum_marg_lh_loss",
    "supcon_loss",
    "temperature_free_loss",
    "temperature_mixture_loss",
    "weibit_loss",
    "weince_loss",
]  # fmt: skip
