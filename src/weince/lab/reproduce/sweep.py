"""Carry out the missing ones of many runs, here or on a cluster, with a progress bar."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weince.lab.reproduce import execute
from weince.lab.reproduce.clock import Clock
from weince.lab.reproduce.plan import Run
from weince.lab.reproduce.slurm import run_on_slurm

LINE_EVERY = 60.0
"""Seconds between two progress lines if there is no terminal."""


def carry_out(
    runs: Sequence[Run],
    out: Path,
    *,
    jobs: int = 1,
    slurm: bool = False,
    slurm_options: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    name: str = "runs",
) -> dict[str, str]:
    """Carry out those runs that are not done.

    Args:
        runs: All runs; a run that appears twice is carried out once.
        out: Folder of the sweep.
        jobs: Concurrent runs on this machine, or concurrent tasks on the cluster.
        slurm: Submit the runs to Slurm and wait for them.
        slurm_options: Options of sbatch under submitit's names.
        clock: A deadline, for runs on this machine.
        name: Label of the progress bar.

    Returns:
        Why runs failed, by their names.
    """
    every = {run.folder: run for run in runs}
    left = [run for run in every.values() if not execute.is_done(run)]
    if not left:
        return {}
    (out / "runs").mkdir(parents=True, exist_ok=True)  # fail here once, not in every run
    from rich.progress import MofNCompleteColumn

    from weince.progress import telling_bars

    with telling_bars(MofNCompleteColumn(), every=LINE_EVERY) as bar:
        task = bar.add_task(name, total=len(every), completed=len(every) - len(left), said="")

        def tell(run: Run, what: str) -> None:
            bar.update(task, advance=what in ("done", "failed"), said=f"{what} {run.name}")
            if bar.in_lines:
                bar.say(f"{what} {run.name}")

        def idle() -> None:
            bar.update(task)  # without a terminal, prints a line when one is due

        try:
            if slurm:
                return run_on_slurm(left, out=out, jobs=jobs, options=slurm_options, tell=tell, idle=idle)
            return execute.run_here(left, jobs=jobs, tell=tell, idle=idle, clock=clock)
        except KeyboardInterrupt:
            rest = "the jobs stay in the queue" if slurm else "finished runs are kept"
            bar.say(f"interrupted: {rest}; the same command goes on from here")
            raise
