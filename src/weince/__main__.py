"""``python -m weince`` is the command ``weince``."""

import contextlib
import sys

from weince.cli import main

if __name__ == "__main__":
    # Fabric imports torchmetrics, if it is installed, only to compare its version. torchmetrics imports transformers
    # and half of scipy. A run needs none of it, and would start seconds later.
    if sys.argv[1:2] == ["train"] and "--help" not in sys.argv:
        sys.modules["torchmetrics"] = None  # type: ignore[assignment]
        with contextlib.suppress(ImportError):  # the command says what is missing
            import lightning_fabric  # noqa: F401
        del sys.modules["torchmetrics"]
    sys.exit(main())
