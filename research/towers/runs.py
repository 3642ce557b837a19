"""List and execute the runs of the study of two towers; see README.md beside this file."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from weince.lab.configure import PRESETS

HERE = Path(__file__).parent
TEMPERATURES = (0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
SECONDS = {"deb": 8, "code": 9, "it": 7, "all": 30, "icons": 25}
"""What a run on a set costs on an H200, six at a time."""
SEEDS, RATES = (7, 21, 63, 84), (5e-5, 1e-4, 3e-4, 1e-3)
LOSSES = (
    "infonce", "siglip", "hcl", "dcl", "kl_ball", "rince", "mixture", "paper", "released", "negatives_only",
    "mw", "lse_pair", "sum_marg_lh", "focal", "temperature_free", "weibit",
)  # fmt: skip


class Job(NamedTuple):
    """A run, or a comparison of losses.

    Attributes:
        part: Letter of the part.
        name: Its folder below the part's.
        data: Name of its data set.
        arguments: Arguments of the command, without data and folder.
        seconds: Cost on an H200.
        command: ``train`` or ``compare``.
    """

    part: str
    name: str
    data: str
    arguments: tuple[str, ...]
    seconds: float
    command: str = "train"


def run(part: str, name: str, data: str, *, cost: float = 1.0, **settings: object) -> Job:
    """A training; ``__`` in a setting's name stands for a dot."""
    given = {
        "config": "image_text" if data == "icons" else "retrieval",
        **({} if data == "icons" else {"model": "MINILM", "corpus": "split"}),
        **({"epochs": 1} if data == "code" else {}),
        "seed": SEEDS[0],
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    arguments = tuple(part for key, value in given.items() for part in (f"--{key}", _written(value)))
    return Job(part, name, data, arguments, SECONDS[data] * cost)


def comparison(
    part: str, data: str, *, losses: Sequence[str] = LOSSES, cost: float = 1.0, **settings: object
) -> Job:
    """Losses with five tries and four seeds each."""
    known = [loss for loss in losses if loss in PRESETS]
    config = "image_text" if data == "icons" else "retrieval"
    shared = {**({} if data == "icons" else {"model": "MINILM", "corpus": "split"}), **settings}
    arguments = [*known, "--config", config, "--tries", "5", "--jobs", "6", "--set"]
    arguments += [f"{key.replace('__', '.')}={_written(value)}" for key, value in shared.items()]
    return Job(
        part, f"compare_{data}", data, tuple(arguments), 9 * len(known) * SECONDS[data] * cost, "compare"
    )


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


SCRATCH = {"model": "starts:minilm_from_scratch", "epochs": 6, "optimizer__lr": 5e-4}
MINED = {"hard": 4, "negatives": "MINED"}


def temperatures() -> list[Job]:
    """Part a: 12 combinations, each at eight temperatures and with a learned one."""
    combinations: dict[str, tuple[str, dict[str, object]]] = {
        "deb": ("deb", {}),
        "code": ("code", {}),
        "it": ("it", {}),
        "icons": ("icons", {}),
        "deb_batch_128": ("deb", {"batch": 128}),
        "deb_batch_2048": ("deb", {"batch": 2048}),
        "deb_batch_8192": ("deb", {"batch": 8192, "micro_batch": 1024}),
        "deb_hard_4": ("deb", MINED),
        "code_batch_128": ("code", {"batch": 128}),
        "code_batch_2048": ("code", {"batch": 2048}),
        "deb_scratch": ("deb", SCRATCH),
        "code_scratch": ("code", {**SCRATCH, "epochs": 2}),
    }
    jobs = []
    for name, (data, settings) in combinations.items():
        cost = 2.0 if settings.get("model") else 1.0
        for t in TEMPERATURES:
            jobs.append(run("a", f"{name}_t{t:g}", data, cost=cost, loss__temperature=t, **settings))
        learned = {"loss__temperature": 0.05, "loss__options": {"learn_temperature": True}}
        jobs.append(run("a", f"{name}_learned", data, cost=cost, **learned, **settings))
    return jobs


def gains() -> list[Job]:
    """Part d: one choice at a time, from InfoNCE at 0.03."""
    choices: dict[str, dict[str, object]] = {
        "basis": {},
        **{f"hard_{k}_{'shared' if shared else 'own'}": {**MINED, "hard": k, "shared": shared}
           for k in (1, 4, 8) for shared in (True, False)},
        "hard_4_again": {"hard": 4, "mine_every": 1},
        **{f"batch_{n}": {"batch": n} for n in (128, 2048)},
        "batch_2048_equal_steps": {"batch": 2048, "epochs": 12},
        **{f"ignore_above_{m:g}": {"loss__options": {"ignore_above": m}} for m in (0.0, 0.1, 0.2)},
        "duplicates_as_negatives": {"leave_out": "nothing"},
        "both_directions": {"candidates": "clip"},
        "within": {"loss__options": {"within": True}},
        **{f"lr_{lr:g}": {"optimizer__lr": lr} for lr in (3e-5, 3e-4, 1e-3)},
        **{f"epochs_{n}": {"epochs": n} for n in (1, 6)},
    }  # fmt: skip
    jobs = [
        run(
            "d",
            f"{data}_{name}_seed_{seed}",
            data,
            cost=float(settings.get("epochs", 3)) / 3,
            **{"seed": seed, **settings},
        )
        for data in ("deb", "code")
        for name, settings in choices.items()
        for seed in SEEDS[:2]
    ]
    return [*jobs, *(run("d", f"deb_groups_seed_{s}", "deb", leave_out="groups", seed=s) for s in SEEDS[:2])]


def claims() -> list[Job]:
    """Part e: what is no row of b or d."""
    hard = [
        run("e", f"deb_hardness_{a}_t{t:g}", "deb", loss__temperature=t, loss__options={"hardness": a})
        for t, a in ((0.03, 5), (0.03, 9), (0.05, 5), (0.05, 9))
    ]
    several = [
        run("e", f"all_{loss}", "all", loss__preset=loss)
        for loss in ("infonce", "lse_pair")
        if loss in PRESETS
    ]
    return [*hard, *several]


def jobs() -> list[Job]:
    """All runs, the most important first."""
    return [
        *temperatures(),
        *(run("b", f"{of}_lr_{lr:g}", of, optimizer__lr=lr) for of in ("deb", "code") for lr in RATES),
        *(comparison("b", data) for data in ("deb", "code")),
        comparison("c", "deb", cost=2.0, **SCRATCH),
        comparison("c", "icons"),
        *gains(),
        *claims(),
    ]  # fmt: skip


def tiny() -> list[Job]:
    """Two runs on the embedded set, to see that everything works."""
    common = ("--config", "retrieval_tiny", "--epochs", "1")
    return [
        Job("a", "tiny_t0.05", "", common, 1),
        Job("d", "tiny_hard", "", (*common, "--hard", "1", "--mine-every", "1"), 1),
    ]


def command_of(job: Job, out: Path, places: dict[str, str]) -> list[str]:
    """The command of a job; MINILM and MINED in it are replaced by their places."""
    arguments = [places.get(part, part) if part in ("MINILM", "MINED") else part for part in job.arguments]
    arguments = [part.replace("=MINILM", f"={places.get('MINILM', 'MINILM')}") for part in arguments]
    where = ["--data", places[job.data]] if job.data else []
    return [
        sys.executable,
        "-m",
        "weince",
        job.command,
        *arguments,
        *where,
        "--out",
        str(out / job.part / job.name),
    ]


def carry_out(job: Job, out: Path, places: dict[str, str]) -> str:
    """Execute a job unless it is done; returns what to say about it."""
    folder = out / job.part / job.name
    if result_of(folder) is not None:
        return f"{job.part}/{job.name}: done before"
    folder.parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        command_of(job, out, places), capture_output=True, text=True, check=False, cwd=HERE
    )
    said = ended.stderr.strip().splitlines()[-1:] if ended.returncode else ["done"]
    return f"{job.part}/{job.name}: {said[0] if said else 'failed'}"


def result_of(folder: Path) -> dict[str, float] | None:
    path = folder / "evaluation.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(chosen: Sequence[Job], out: Path) -> str:
    """The figures of what is done, as a table."""
    lines = ["| part | run | valid nDCG@10 | test nDCG@10 | recall at 10 |", "|---|---|---|---|---|"]
    for job in chosen:
        result = result_of(out / job.part / job.name)
        if result is not None:
            figures = (result[key] for key in ("ndcg_validation", "ndcg_test", "recall_10_test"))
            lines.append(f"| {job.part} | {job.name} | {' | '.join(f'{x:.2f}' for x in figures)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the runs and their cost, execute none")
    parser.add_argument(
        "--table", action="store_true", help="print the figures of what is done, execute none"
    )
    parser.add_argument("--tiny", action="store_true", help="two runs on the embedded set instead")
    parser.add_argument("--only", default="", help="letters of parts, or words in names, with commas")
    parser.add_argument("--data", default="", help="NAME=PATH,... of deb, code, it, all, icons")
    parser.add_argument(
        "--minilm", default="sentence-transformers/all-MiniLM-L6-v2", help="the starting encoder"
    )
    parser.add_argument(
        "--mined", default="negatives.jsonl", help="file of weince mine for deb (8 negatives)"
    )
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time (default: 6)")
    parser.add_argument("--out", type=Path, default=Path("runs/towers"), help="folder of all runs")
    options = parser.parse_args(arguments)
    wanted = [word for word in options.only.split(",") if word]
    every = tiny() if options.tiny else jobs()
    chosen = [
        job
        for job in every
        if not wanted or any(word == job.part or (len(word) > 1 and word in job.name) for word in wanted)
    ]
    if options.list:
        for job in chosen:
            print(
                f"{job.part}  {job.seconds:6.0f} s  {job.name}: weince {job.command} {shlex.join(job.arguments)}"
            )
        print(f"{len(chosen)} runs, {sum(job.seconds for job in chosen):,.0f} s")
        return
    if options.table:
        print(table(chosen, options.out.absolute()))
        return
    places = dict(part.split("=", 1) for part in options.data.split(",") if part)
    places = {name: str(Path(place).absolute()) for name, place in places.items()}
    places |= {"MINILM": options.minilm, "MINED": str(Path(options.mined).absolute())}
    missing = {job.data for job in chosen if job.data} - places.keys()
    if missing:
        parser.error(
            f"--data must say where {', '.join(sorted(missing))} are; got {options.data or 'nothing'}"
        )
    with ThreadPoolExecutor(options.jobs) as pool:
        for said in pool.map(lambda job: carry_out(job, options.out.absolute(), places), chosen):
            print(said, flush=True)


if __name__ == "__main__":
    main()
