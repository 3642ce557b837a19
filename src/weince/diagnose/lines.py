"""Lines to copy: a loss as code, and the command that trains with it.

With ``candidates="cross"`` the loss has that option, and the command trains on pairs of sentences: runs on images
contrast all views.
"""

from weince.evt.link_test import Competing


def short(value: float) -> str:
    """A number with three significant digits, without trailing zeros."""
    return f"{float(f'{value:.3g}'):g}"


def _option(candidates: Competing) -> str:
    return "" if candidates == "views" else f', candidates="{candidates}"'


def _train(candidates: Competing) -> str:
    # Without data of the reader's own it would train on digits.
    return "weince train " + ("--data mine.npz" if candidates == "views" else "--config sentence_pairs")


def softmax_code(tau0: float, candidates: Competing = "views") -> str:
    """InfoNCE at the fitted temperature."""
    return f"from weince import InfoNCELoss\n\nloss = InfoNCELoss(temperature={short(tau0)}{_option(candidates)})"


def ids_code(tau0: float, candidates: Competing = "views") -> str:
    """InfoNCE at the fitted temperature, with equal ids for equal documents."""
    return (
        "import torch\nfrom weince import InfoNCELoss\n\n"
        f"loss = InfoNCELoss(temperature={short(tau0)}{_option(candidates)})\n"
        "numbers = {}  # of all texts: equal ones get equal ids\n"
        "ids = torch.tensor([numbers.setdefault(text, len(numbers)) for text in documents])\n"
        "loss(z_i, z_j, ids=ids)"
    )


def link_code(lam: float, tau: float, candidates: Competing = "views") -> str:
    """The fitted link as a loss.

    The test's logit is ``((1 - lam) * s + lam * g(s)) / tau``, ``g(s) = -log(1 - s)``; BlendLink's is
    ``(1 - lam) * s / temperature + lam * beta * g(s)``. So temperature is tau and beta is 1 / tau.
    """
    if lam > 0.9995:
        return f"from weince import WeibitLoss\n\nloss = WeibitLoss(beta={short(1.0 / tau)}{_option(candidates)})"
    return (
        "from weince import BlendLink, LinkLoss\n\n"
        f"loss = LinkLoss(BlendLink(lam={short(lam)}, beta={short(1.0 / tau)}, temperature={short(tau)})"
        f"{_option(candidates)})"
    )


def softmax_train(tau0: float, candidates: Competing = "views") -> str:
    """The command that trains with the loss of `softmax_code`."""
    return f"{_train(candidates)} --loss.preset infonce --loss.temperature {short(tau0)}"


def link_train(lam: float, tau: float, candidates: Competing = "views") -> str:
    """The command that trains with the loss of `link_code`."""
    if lam > 0.9995:
        return f"{_train(candidates)} --loss.preset weibit --loss.temperature {short(tau)}"
    return (
        f"{_train(candidates)} --loss.preset link --loss.lam {short(lam)} --loss.beta {short(1.0 / tau)} "
        f"--loss.temperature {short(tau)}"
    )


def both_code(lam: float, tau: float, tau0: float, candidates: Competing = "views") -> str:
    """Both losses: first softmax at the fitted temperature, then the link."""
    first, second = (
        code.splitlines() for code in (softmax_code(tau0, candidates), link_code(lam, tau, candidates))
    )
    names = sorted(
        ", ".join(line.removeprefix("from weince import ") for line in (first[0], second[0])).split(", ")
    )
    return "\n".join(
        [f"from weince import {', '.join(names)}", "", f"{first[2]}  # first", f"{second[2]}  # then"]
    )
