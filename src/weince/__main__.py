"""``python -m weince`` is the command ``weince``."""

import contextlib
import sys

from weince.cli import main

if __name__ == "__main__":
    # Fabric imports torchmetrics, where it is installed, to compare its version, and that imports transformers and
    # half of scipy: seconds for each of the many short runs of a sweep, which need none of it.
    if sys.argv[1:2] == ["train"] and "--help" not in sys.argv:
        sys.modules["torchmetrics"] = None  # type: ignore[assignment]
        with contextlib.suppress(ImportError):  # the command says what is missing
            import lightning_fabric  # noqa: F401
        del sys.modules["torchmetrics"]
    sys.exit(main())
