"""The command ``weince diagnose``: its options, and where its embeddings come from."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from weince.command_line import option

if TYPE_CHECKING:
    from weince.diagnose.reading import EmbeddedPairs


@dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Tell which temperature or link fits your embeddings.

    Tell which temperature or link fits paired embeddings, and write a page. (A link turns a score, the cosine of two
    embeddings, into a logit.)

    input: --queries Q.npy --documents D.npy, row k with row k or as --pairs FILE says; or --model MODEL --pairs FILE,
           a .csv, .tsv or .jsonl file with the columns query and positive, which the model embeds; or
           .npz or .safetensors with z_i and z_j of shape (pairs, dim), positives row by row (and, if you like, ids:
           pairs with equal ids never compete), or with z (rows, dim) and labels (rows,); .npy of shape
           (2, pairs, dim), or two .npy files of shape (pairs, dim), one after the other; or a folder of such files;
           or the folder of a run of `weince train`, whose held-out images are embedded (--trend: at every snapshot).
           Several inputs are several models, drawn side by side.

    How much to compute: defaults are in parentheses, those of --quick in brackets.
    """

    inputs: list[Path] = option([], "files or folders, see above", "INPUT", word=True)
    queries: Path | None = option(None, "embeddings of queries, (queries, dim)", "FILE")
    documents: Path | None = option(None, "embeddings of documents, (documents, dim)", "FILE")
    model: list[str] = option(
        [], "sentence-transformers models, folders or names on the hub, which embed --pairs"
    )
    pairs: Path | None = option(
        None, "table of query and positive (and group): texts, or row numbers or ids", "FILE"
    )
    out: Path = option(Path("weince-report"), "folder to write")
    names: list[str] = option([], "what to call the models (default: the files' names)", "NAME")
    temperature: float | None = option(
        None, "temperature of training, 1 / scale elsewhere (default: the run's)"
    )
    candidates: Literal["views", "cross"] | None = option(
        None,
        "candidates of an anchor, as in the loss that trained the models: views, all other rows of both views, as in "
        "SimCLR; or cross, where the anchors are the rows of z_i and the candidates the rows of z_j, as in CLIP "
        "(default: cross for queries and documents, else views)",
    )
    trend: bool = option(False, "the inputs are checkpoints of one run, in order")
    average: bool = option(False, "the inputs are one recipe with several seeds: add their mean")
    quick: bool = option(False, "compute fewer batches and simulations: a first look, not a result")
    paper: bool = option(
        False, "add the figures of the WEINCE paper: tail, ablations, risk, anchors (a minute more)"
    )
    batch_size: int | None = option(
        None, "pairs in a batch of training (256, or fewer if there are few pairs)"
    )
    batches: int | None = option(None, "largest number of batches (32) [16]")
    bootstraps: int | None = option(None, "resamplings of held-out batches (2000) [500]")
    null_draws: int | None = option(None, "simulations under softmax (200) [99]")
    tail_bootstraps: int | None = option(None, "resamplings and simulations of the tail (100) [50]")
    quantile: float | None = option(
        None, "quantile of the negative scores above which the tail begins (0.99)"
    )
    seed: int | None = option(None, "seed of every draw (0)")

    examples: ClassVar = """
weince diagnose pairs.npz --temperature 0.5
weince diagnose images_and_texts.npz --candidates cross --temperature 0.01
weince diagnose infonce.npz weince.npz --out report --quick
weince diagnose seed_1.npz seed_2.npz seed_3.npz --average
weince diagnose checkpoints/ --trend --out run
weince diagnose --queries q.npy --documents d.npy
weince diagnose --model all-MiniLM-L6-v2 --pairs pairs.csv    (needs weince[text])
weince diagnose runs/cifar100 --trend                (a run of `weince train`, with its snapshots)
"""

    def __call__(self, typed: str) -> None:
        from weince.diagnose.diagnosis_settings import DiagnosisSettings, settings_for
        from weince.diagnose.report import check_out, write_diagnosis

        values = {item.name: getattr(self, item.name, None) for item in fields(DiagnosisSettings)}
        asked = {name: value for name, value in values.items() if value is not None}
        if self.queries is not None or self.model:
            asked.setdefault("candidates", "cross")
        settings = settings_for(self.quick, **asked)
        check_out(self.out)
        embedded, temperature = self._embedded(settings.seed)
        supplement = None
        if self.paper:
            from weince.lab.paper.supplement import PAPER

            supplement = PAPER
        index = write_diagnosis(
            embedded,
            self.out,
            replace(settings, temperature=temperature),
            trend=self.trend,
            average=self.average,
            command=typed,
            supplement=supplement,
        )
        print(index)

    def _embedded(self, seed: int) -> "tuple[list[EmbeddedPairs], float | None]":
        """The embeddings of all inputs, and the temperature that they were trained with, or None if it is unknown."""
        from weince.diagnose.pair_files import embed_pairs, load_towers
        from weince.diagnose.reading import load_pairs, rename

        names = self.names or None
        towers = self.queries is not None or self.documents is not None
        if bool(self.inputs) + towers + bool(self.model) != 1:
            raise ValueError("give one of INPUT, --queries with --documents, and --model with --pairs")
        if self.model:
            if self.pairs is None:
                raise ValueError("--model embeds the texts of --pairs FILE: give both")
            return embed_pairs(self.model, self.pairs, names=names), self.temperature
        if towers:
            if self.queries is None or self.documents is None:
                raise ValueError("--queries and --documents go together: give both")
            return rename([load_towers(self.queries, self.documents, self.pairs)], names), self.temperature
        if self.pairs is not None:
            raise ValueError("--pairs goes with --model, or with --queries and --documents")
        runs = [path for path in self.inputs if (path / "run.yaml").is_file()]
        if runs and runs != self.inputs:
            got = ", ".join(map(str, self.inputs))
            raise ValueError(f"want runs of weince train or embeddings, not both; got {got}")
        if runs:
            from weince.lab.tasks.images.runs import run_pairs, temperature_of

            embedded = run_pairs(self.inputs, names=names, trend=self.trend, seed=seed)
            return embedded, temperature_of(self.inputs) if self.temperature is None else self.temperature
        models = [path for path in self.inputs if (path / "modules.json").is_file()]
        if models:
            raise ValueError(
                f"{models[0]} is a sentence-transformers model: give it as --model, with --pairs FILE"
            )
        return load_pairs(self.inputs, names=names, seed=seed), self.temperature
