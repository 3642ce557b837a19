"""The process of a run: ``python -m weince.lab.study.worker FOLDER STEP...`` trains and measures.

``FOLDER/asked.yaml`` has the settings. A step is ``train`` or the name of a measure. The process ends
when the one that started it is gone.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from weince.errors import explained
from weince.lab import settings
from weince.lab.configure import line_named
from weince.lab.tasks.registry import task_of
from weince.lab.training.processes import end_with_parent

ASKED = "asked.yaml"


def work(folder: Path, steps: Sequence[str]) -> None:
    """Take the steps of the run in a folder, one after the other."""
    content = settings.load(str(folder / ASKED))
    task = task_of(content)
    run = settings.build(task.settings, content)
    for step in steps:
        if step == "train":
            with line_named(run.loss.preset):
                task.train(run)
        elif (take := task.measures[step].take) is not None:
            take(folder, run.device)


def main() -> int:
    end_with_parent()
    folder, *steps = sys.argv[1:]
    try:
        work(Path(folder), steps)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = explained(error)
        if message is None:
            raise
        print(f"weince: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
