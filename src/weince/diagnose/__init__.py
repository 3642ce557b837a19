"""Diagnose paired embeddings: load, compute, write a folder with a page to look at.

    from weince.diagnose import diagnose

    index = diagnose({"my encoder": (z_i, z_j)}, "report")

The work is done in `weince.diagnose.report`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike
from torch import Tensor

__all__ = ["diagnose"]

OUT = Path("weince-report")


def diagnose(
    inputs: Mapping[str, Sequence[ArrayLike | Tensor]],
    out: str | Path = OUT,
    *,
    quick: bool = False,
    trend: bool = False,
    average: bool = False,
    progress: bool = True,
    **changes: Any,
) -> Path:
    """Diagnose named pairs of embeddings and write the page; the defaults are those of ``weince diagnose``.

    Args:
        inputs: For each model ``(z_i, z_j)``, both ``(pairs, dim)``, positives row by row, at least 128 pairs; or
            ``(z_i, z_j, ids)``: pairs with equal ids never compete.
        out: Folder to write. An earlier diagnosis in it is replaced; if it holds anything else, an error is raised.
        quick: Use fewer batches and simulations: seconds instead of a minute for a few thousand pairs.
        trend: The models are checkpoints of one run, in order.
        average: The models are one recipe with several seeds: add their mean.
        progress: Show progress bars and the verdicts on stderr.
        changes: Fields of `weince.diagnose.diagnosis_settings.DiagnosisSettings`: ``temperature`` (the one the models
            were trained with), ``candidates`` (``"cross"`` if only rows of the other view compete, as in CLIP),
            ``seed``, ``batch_size``, ``batches``, ``bootstraps`` and others.

    Returns:
        Path of ``index.html``.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from weince.diagnose import diagnose
        >>> z, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> with tempfile.TemporaryDirectory() as out:
        ...     page = diagnose({"mine": (z, z + noise)}, out, quick=True, progress=False, temperature=0.5)
        >>> page.name
        'index.html'
    """
    # Here, since other packages read embeddings or draw a page with modules of this one: scipy and matplotlib would
    # cost their processes seconds.
    from weince.diagnose.diagnosis_settings import settings_for
    from weince.diagnose.report import named_pairs, write_diagnosis

    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be {{name: (z_i, z_j)}}; got {type(inputs).__name__}")
    pairs = [named_pairs(str(name), views) for name, views in inputs.items()]
    return write_diagnosis(
        pairs, Path(out), settings_for(quick, **changes), trend=trend, average=average, progress=progress
    )
