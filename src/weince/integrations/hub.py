"""Find models: in a folder, or by name on the Hugging Face hub."""

from pathlib import Path

PATIENCE = 10
"""Seconds to wait for the hub to answer."""


def only_here(model: str) -> bool:
    """Whether to look for a model on this machine only: it is a folder, or the hub does not answer.

    One request decides; the loaders would retry for a minute before giving up.
    """
    if Path(model).is_dir():
        return True
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # the types vary between versions; the loader will report what is missing
        return True
    return False


def cannot_load(model: str, local: bool, error: Exception) -> OSError:
    """An error that says in one line why a model could not be loaded from where :func:`only_here` said to look."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if Path(model).is_dir():
        where = "the folder"
    elif local:
        where = "the hub's cache on this machine, and the hub does not answer (is there a network?); give a folder"
    else:
        where = "the hub"
    return OSError(f"cannot load model {model!r} from {where}: {reason}")
