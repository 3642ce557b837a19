"""Errors as one line for the user of a command."""

import re

_EXTRAS = {
    "datasets": "text",
    "sentence_transformers": "text",
    "pyarrow": "text",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "tokenizers": "text",
    "transformers": "text",
}  # the extra that installs a package; weince[runs] installs all others


def explained(error: Exception) -> str | None:
    """One line that tells the user what went wrong; None for a bug of ours, which should show its traceback."""
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if not package:  # raised by weince itself; the message says what to install
            return str(error)
        if package == "weince" or not isinstance(error, ModuleNotFoundError):
            return None
        return f"{package} is missing: pip install 'weince[{_EXTRAS.get(package, 'runs')}]'"
    said = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":  # by name, since torch may not be imported
        return f"{said.partition('. GPU')[0]}: take a smaller batch or encoder, or loss.engine chunked"
    if isinstance(error, MemoryError) or "can't allocate memory" in said:  # numpy and torch on a CPU
        asked = re.search(r"allocate ([\d.]+ \w+)", said)
        return f"not enough memory{f' for {asked[1]}' if asked else ''}: ask for less at once"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return said if isinstance(error, ValueError | OSError | OverflowError) else None
