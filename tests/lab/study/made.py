"""Comparisons without training: records whose figures depend on loss, try and seed."""

import random

from weince.lab import settings
from weince.lab.study import compare as of_compare
from weince.lab.study import reproduce as of_reproduce
from weince.lab.study.comparison import Comparison
from weince.lab.study.plan import plan, settings_of
from weince.lab.study.provenance import record
from weince.lab.study.records import add_records
from weince.lab.study.search_space import tries_of
from weince.lab.study.statistics import Done, choose_tries
from weince.lab.study.study import Execution
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.evaluation import fingerprint

CONFIG = """\
task: vision
data: digits
encoder: tiny
augment: {size: 8}
loss: {preset: infonce, temperature: 0.5}
optimizer: {lr: 0.002}
epochs: 4
batch: 256
"""
TEXT = """\
task: text
loss: {preset: infonce, temperature: 0.05}
batch: 16
max_length: 12
lr: 0.001
eval_every: 3
"""
NAMES = "linear", "knn", "r1", "map_r"


def compare(losses=(), **options):
    """`weince.lab.study.compare.compare`, whose question and execution are made of the options."""
    question, rest = taken(of_compare.Question, options)
    how, rest = taken(Execution, rest)
    return of_compare.compare(of_compare.Question(losses, **question), how=Execution(**how), **rest)


def reproduce(table, **options):
    """`weince.lab.study.reproduce.reproduce`, whose execution is made of the options."""
    how, rest = taken(Execution, options)
    return of_reproduce.reproduce(table, how=Execution(**how), **rest)


def taken(kind, options):
    """The options that are fields of a dataclass, and the others."""
    names = kind.__dataclass_fields__
    return (
        {name: value for name, value in options.items() if name in names},
        {name: value for name, value in options.items() if name not in names},
    )


def digits():
    """Fingerprint of the data of `CONFIG`."""
    return fingerprint(load("digits", size=8))


def config_in(folder, content=CONFIG, name="small.yaml"):
    path = folder / name
    path.write_text(content)
    return str(path)


def comparison_of(config, *losses, tries=2, **changes):
    spaces = {loss: tries_of(loss, config)[:tries] for loss in losses}
    return Comparison(config=config, losses=spaces, **({"baseline": losses[0]} | changes))


def files_of(run, value, *, without=(), **evaluation):
    """The record of a run whose test figures are ``value``."""
    content = settings.as_written(settings_of(run))
    if content["task"] == "text":
        return text_files_of(run, value, content, **evaluation)
    figures = {
        f"{name}_{kind}_mean": value + shift
        for name in NAMES
        if name not in without
        for kind, shift in (("validation", 1.0), ("test", 0.0))
    }
    told = {"data": "digits", "fingerprint": "01", "quick": False, "probe_seeds": [1], "split_seeds": [1]}
    epochs = content["epochs"]
    where = {"hardware": "a CPU", "commit": "0.1.0", "seconds": 9.0}
    return {
        "run.yaml": content | {"out": f"runs/{run.name}"},
        "evaluation.json": {**told, **figures, **evaluation},
        "made.json": {"key": run.key, "command": "weince train", "measures": {"evaluation": where}},
        "log.csv": {
            "epoch": list(range(1, epochs + 1)),
            "crowded": [epoch / 100 for epoch in range(epochs, 0, -1)],
            "seconds": [2.0 + run.try_number / 10] * epochs,
        },
    }


def text_files_of(run, value, content, **evaluation):
    """The same for a run on text: two dev scores, the best one point above the test score."""
    told = {"data": "wiki.txt, sts.tsv, bert", "fingerprint": "01", "best_step": 6}
    figures = {"dev": value + 1.0, "tasks": {"STSB": value, "STS12": value + 4.0}, "mean": value + 2.0}
    where = {"hardware": "a CPU", "commit": "0.1.0", "seconds": 9.0}
    return {
        "run.yaml": content | {"out": f"runs/{run.name}"},
        "result.json": {**told, **figures, **evaluation},
        "made.json": {"key": run.key, "command": "weince train", "measures": {"sts": where}},
        "log.csv": {
            "step": [3, 4, 6],
            "epoch": [0.5, 0.75, 1.0],
            "dev": [value, None, value + 1.0],
            "seconds": [2.0, 1.0, 1.0],
        },
    }


def value_of(run, gains):
    """50 plus the gain of the loss, minus the index of the try, plus noise by loss and seed."""
    noise = random.Random(f"{run.loss} {run.seed}").gauss(0.0, 0.3)
    return 50.0 + gains.get(run.loss, 0.0) - run.try_number + noise + run.seed / 100


def fill(comparison, out, *, gains=None, seeds=True, **options):
    """Write records of all tries, and of all seeds of the chosen ones; returns the runs."""
    runs = plan(comparison.tries_table(), out)
    gains = gains or {}
    records = {run.name: files_of(run, value_of(run, gains), **options) for run in runs}
    if seeds:
        add_records(out, records)
        chosen = choose_tries(comparison, runs, {run.name: Done(run, record(run)) for run in runs})
        more = plan(comparison.seeds_table(chosen), out)
        records |= {run.name: files_of(run, value_of(run, gains), **options) for run in more}
        runs = list({run.folder: run for run in (*runs, *more)}.values())
    add_records(out, records)
    return runs
