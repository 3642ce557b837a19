"""The command ``weince diagnose``: its options and texts, and where its embeddings come from."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weince.diagnose.reading import EmbeddedPairs

DIAGNOSE = """\
Tell which temperature or link fits paired embeddings, and write a page. (A link turns a score, the cosine of two
embeddings, into a logit.)

input: --queries Q.npy --documents D.npy, row k with row k or as --pairs FILE says; or --model MODEL --pairs FILE,
       a .csv, .tsv or .jsonl file with the columns query and positive, which the model embeds; or
       .npz or .safetensors with z_i and z_j of shape (pairs, dim), positives row by row (and, if you like, ids:
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
  weince diagnose --queries q.npy --documents d.npy
  weince diagnose --model all-MiniLM-L6-v2 --pairs pairs.csv    (needs weince[text])
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
    parser.add_argument("inputs", nargs="*", type=Path, metavar="INPUT", help="files or folders, see above")
    parser.add_argument("--queries", type=Path, metavar="FILE", help="embeddings of queries, (queries, dim)")
    parser.add_argument(
        "--documents", type=Path, metavar="FILE", help="embeddings of documents, (documents, dim)"
    )
    parser.add_argument("--model", action="extend", nargs="+", default=[], help="sentence-transformers models, "
                        "folders or names on the hub, which embed --pairs")  # fmt: skip
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="table with the columns query and positive (and "
                        "group): texts for --model, else row numbers or ids")  # fmt: skip
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
        "CLIP (default: cross for queries and documents, else views)",
    )
    parser.add_argument(
        "--trend", action="store_true", help="the inputs are checkpoints of one run, in order"
    )
    parser.add_argument(
        "--average", action="store_true", help="the inputs are one recipe with several seeds: add their mean"
    )
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
        "--batch-size", type=int, help="pairs in a batch of training (256, or fewer if there are few pairs)"
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
    if options.queries is not None or options.model:
        asked.setdefault("candidates", "cross")
    settings = settings_for(options.quick, **asked)
    check_out(options.out)
    pairs, temperature = _pairs_to_diagnose(options, settings.seed)
    supplement = None
    if options.paper:
        from weince.lab.paper.supplement import PAPER

        supplement = PAPER
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
    from weince.diagnose.pair_files import embed_pairs, load_towers
    from weince.diagnose.reading import load_pairs, rename

    ways = [
        bool(options.inputs),
        options.queries is not None or options.documents is not None,
        bool(options.model),
    ]
    if sum(ways) != 1:
        raise ValueError("give one of INPUT, --queries with --documents, and --model with --pairs")
    if options.model:
        if options.pairs is None:
            raise ValueError("--model embeds the texts of --pairs FILE: give both")
        return embed_pairs(options.model, options.pairs, names=options.names), options.temperature
    if not options.inputs:
        if options.queries is None or options.documents is None:
            raise ValueError("--queries and --documents go together: give both")
        pairs = load_towers(options.queries, options.documents, options.pairs)
        return rename([pairs], options.names), options.temperature
    if options.pairs is not None:
        raise ValueError("--pairs goes with --model, or with --queries and --documents")
    runs = [path for path in options.inputs if (path / "run.yaml").is_file()]
    if runs and runs != options.inputs:
        got = ", ".join(map(str, options.inputs))
        raise ValueError(f"want runs of weince train or embeddings, not both; got {got}")
    if runs:
        from weince.lab.tasks.images.runs import run_pairs, temperature_of

        found = run_pairs(options.inputs, names=options.names, trend=options.trend, seed=seed)
        known = temperature_of(options.inputs) if options.temperature is None else options.temperature
        return found, known
    models = [path for path in options.inputs if (path / "modules.json").is_file()]
    if models:
        raise ValueError(
            f"{models[0]} is a sentence-transformers model: give it as --model, with --pairs FILE"
        )
    return load_pairs(options.inputs, names=options.names, seed=seed), options.temperature
