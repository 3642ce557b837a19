"""Models by their name on the hub, or from a folder."""

from pathlib import Path

PATIENCE = 10
"""Seconds to wait for the hub to answer."""


def only_here(model: str) -> bool:
    """Whether to look for a model on this machine alone: it is a folder, or the hub does not answer.

    Asked once, since the loaders would ask again and again, for a minute, before they give up.
    """
    if Path(model).is_dir():
        return True
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of many kinds, which change with the versions; the loader will say what is missing
        return True
    return False


def cannot_load(model: str, local: bool, error: Exception) -> OSError:
    """One line why a model was not found where :func:`only_here` said to look."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if Path(model).is_dir():
        where = "the folder"
    elif local:
        where = "the hub's cache on this machine, and the hub does not answer (is there a network?); give a folder"
    else:
        where = "the hub"
    return OSError(f"cannot load model {model!r} from {where}: {reason}")
