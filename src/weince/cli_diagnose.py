"""The command ``weince diagnose``: its options and texts, and where its embeddings come from."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weince.diagnose.reading import EmbeddedPairs

DIAGNOSE = """\
Tell which temperature or link fits paired embeddings, and write a page. (A link turns a score, the cosine of two
embeddings, into a logit.)

input: .npz or .safetensors with z_i and z_j of shape (pairs, dim), positives row by row (and, if you like, ids:
       pairs with equal ids never compete), or with z (rows, dim) and labels (rows,); .npy of shape
       (2, pairs, dim), or two .npy files of shape (pairs, dim), one after the other; or a folder of such files;
       or the folder of a run of `weince train`, whose held-out images are embedded (--trend: at every snapshot).
       Several inputs are several models, drawn side by side.
"""
DIAGNOSE_EXAMPLES = """\
examples:
  weince diagnose pairs.npz --temperature 0.5
  weince diagnose images_and_texts.npz --candidates cross --temperature 0.01
  weince diagnose infonce.npz weince.npz --out report --quick
  weince diagnose seed_1.npz seed_2.npz seed_3.npz --average
  weince diagnose checkpoints/ --trend --out run
  weince diagnose my-model/ --sentences pairs.tsv      (needs weince[text])
  weince diagnose runs/cifar100 --trend                (a run of `weince train`, with its snapshots)
"""


def add_diagnose(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "diagnose",
        help="tell which temperature or link fits your embeddings",
        description=DIAGNOSE,
        epilog=DIAGNOSE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files or folders, see above")
    parser.add_argument(
        "--out", type=Path, default=Path("weince-report"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--names", action="extend", nargs="+", help="what to call the models (default: the files' names)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="temperature that the models were trained with, 1 / scale of other libraries (default: unknown, or the "
        "run's)",
    )
    parser.add_argument(
        "--candidates",
        choices=("views", "cross"),
        help="candidates of an anchor, as in the loss that trained the models: views, all other rows of both views, "
        "as in SimCLR; or cross, where the anchors are the rows of z_i and the candidates the rows of z_j, as in "
        "CLIP (default: views)",
    )
    parser.add_argument(
        "--trend", action="store_true", help="the inputs are checkpoints of one run, in order"
    )
    parser.add_argument(
        "--average", action="store_true", help="the inputs are one recipe with several seeds: add their mean"
    )
    parser.add_argument("--sentences", type=Path, metavar="TSV", help="file with two tab-separated sentences a line, "
                        "no header; the inputs are folders of sentence-transformers models")  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compute fewer batches and simulations: a first look, not a result",
    )
    parser.add_argument(
        "--paper",
        action="store_true",
        help="add the figures of the WEINCE paper: peaks over a threshold, ablations, risk, anchors (a minute more)",
    )
    amount = parser.add_argument_group(
        "how much to compute (defaults in parentheses, those of --quick in brackets)"
    )
    amount.add_argument(
        "--batch-size", type=int, help="pairs in a batch (256, or fewer if there are few pairs)"
    )
    amount.add_argument("--batches", type=int, help="largest number of batches (32) [16]")
    amount.add_argument("--bootstraps", type=int, help="resamplings of held-out batches (2000) [500]")
    amount.add_argument("--null-draws", type=int, help="simulations under softmax (200) [99]")
    amount.add_argument(
        "--tail-bootstraps", type=int, help="resamplings and simulations of the tail (100) [50]"
    )
    amount.add_argument(
        "--quantile", type=float, help="quantile of the negative scores above which the tail begins (0.99)"
    )
    amount.add_argument("--seed", type=int, help="seed of every draw (0)")
    parser.set_defaults(run=_run_diagnose)


def _run_diagnose(options: argparse.Namespace) -> None:
    from dataclasses import fields, replace

    from weince.diagnose.diagnosis_settings import DiagnosisSettings, settings_for
    from weince.diagnose.report import check_out, write_diagnosis

    given = {item.name: getattr(options, item.name, None) for item in fields(DiagnosisSettings)}
    asked = {name: value for name, value in given.items() if value is not None}
    settings = settings_for(options.quick, **asked)
    check_out(options.out)
    pairs, temperature = _pairs_to_diagnose(options, settings.seed)
    supplement = None
    if options.paper:
        from weince.lab.paper.supplement import PAPER as supplement
    index = write_diagnosis(
        pairs,
        options.out,
        replace(settings, temperature=temperature),
        trend=options.trend,
        average=options.average,
        command=options.command_line,
        supplement=supplement,
    )
    print(index)


def _pairs_to_diagnose(options: argparse.Namespace, seed: int) -> "tuple[list[EmbeddedPairs], float | None]":
    """The embeddings of all inputs, and the temperature that they were trained with, or None if it is unknown."""
    from weince.diagnose.reading import encode_sentences, load_pairs

    runs = [path for path in options.inputs if (path / "run.yaml").is_file()]
    if runs and runs != options.inputs:
        got = ", ".join(map(str, options.inputs))
        raise ValueError(f"want runs of weince train or embeddings, not both; got {got}")
    if runs and options.sentences is not None:
        raise ValueError(
            f"--sentences wants a model's folder (a text run's is RUN/best); got the run {runs[0]}"
        )
    if runs:
        from weince.lab.tasks.images.runs import run_pairs, temperature_of

        pairs = run_pairs(options.inputs, names=options.names, trend=options.trend, seed=seed)
        known = temperature_of(options.inputs) if options.temperature is None else options.temperature
        return pairs, known
    models = [path for path in options.inputs if (path / "modules.json").is_file()]
    if models and options.sentences is None:
        raise ValueError(
            f"the folder of a sentence-transformers model wants --sentences PAIRS.tsv; got {models[0]} alone"
        )
    if options.sentences is not None:
        pairs = encode_sentences(options.inputs, options.sentences, names=options.names)
    else:
        pairs = load_pairs(options.inputs, names=options.names, seed=seed)
    return pairs, options.temperature
