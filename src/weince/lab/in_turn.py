"""Run several commands one after the other in one process, which imports torch only once.

``python -m weince.lab.in_turn "weince train --out a" "weince evaluate a"`` does the work of ``python -m weince train
--out a`` and then of ``python -m weince evaluate a``. A command that fails ends the process with its status.
"""

import runpy
import shlex
import sys
from collections.abc import Sequence


def main(commands: Sequence[str]) -> None:
    for command in commands:
        sys.argv = shlex.split(command)
        try:
            runpy.run_module(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main(sys.argv[1:])
