"""``weince`` and ``python -m weince``."""

import atexit
import contextlib
import gc
import sys

from weince.cli import main


def run() -> int:
    """Run a command in a process of its own."""
    # Before it ends, Python searches everything that was imported for garbage once more, which takes long with torch.
    atexit.register(gc.freeze)
    if sys.argv[1:2] == ["train"] and "--help" not in sys.argv:
        with contextlib.suppress(ImportError):  # the command says what is missing
            from weince.lab.training.fabric import import_fabric

            import_fabric()
    return main()


if __name__ == "__main__":
    sys.exit(run())
