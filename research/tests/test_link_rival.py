"""The page on rivals of the bounded tail is reproduced from the records, and rivals survive a summary."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import programs
import pytest

from weince.evt import link_bank, link_rivals

script = programs.script("benchmarks/link_test.py")


def test_the_page_is_what_the_records_say(tmp_path, monkeypatch, capsys):
    shutil.copy(script.RESULTS / "records.jsonl", tmp_path)
    page = (script.RESULTS / "link_rival.md").read_text(encoding="utf-8")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    script.encoders(None)
    assert (tmp_path / "link_rival.md").read_text(encoding="utf-8") == page
    assert page in capsys.readouterr().out


def test_a_missing_record_is_named(tmp_path, monkeypatch):
    (tmp_path / "records.jsonl").write_text("", encoding="utf-8")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"link_rival\.csv"):
        script.encoders(None)


def test_rivals_survive_a_summary():
    """Rivals of pairs with two noise levels survive a round trip through the JSON of `weince diagnose`."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((512, 8))
    noise = rng.choice([0.2, 1.2], size=(512, 1))
    found = link_rivals(
        *link_bank(z, z + noise * rng.standard_normal((512, 8)), batch_size=32), bootstraps=50
    )
    model = json.loads(json.dumps({"rivals": asdict(found)}))
    assert repr(script.rivals_of(model)) == repr(found)  # repr, since NaN is not equal to itself
