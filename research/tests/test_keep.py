"""Records of the studies: extracted files equal the stored ones."""

import json

import programs
import pytest

script = programs.script("research/keep.py")


def test_files_come_out_of_the_archive_as_they_were(tmp_path, capsys):
    (tmp_path / "study").mkdir()
    table, summary = tmp_path / "study" / "trap.csv", tmp_path / "summary.json"
    table.write_bytes(b'loss,seed\r\n"a, ""b""",0.10\r\n')
    summary.write_text('{"gain": 0.25, "\u03bb": [null, 1e-9]}', encoding="utf-8")
    before = table.read_bytes(), json.loads(summary.read_text(encoding="utf-8"))
    where = ["--results", str(tmp_path)]
    script.main([str(table), str(summary), *where])
    table.unlink()
    summary.unlink()
    script.main(["--list", "--extract", "study/trap.csv", "summary.json", *where])
    assert (table.read_bytes(), json.loads(summary.read_text(encoding="utf-8"))) == before
    assert capsys.readouterr().out == "study/trap.csv\nsummary.json\n"
    summary.write_text("2")
    script.main([str(summary), *where])  # replaces its line and keeps the other
    assert script.read_archive(tmp_path) == {
        "study/trap.csv": [["loss", "seed"], ['a, "b"', "0.10"]],
        "summary.json": 2,
    }


def test_a_record_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no record of 'missing\.csv'"):
        script.main(["--extract", "missing.csv", "--results", str(tmp_path)])


def test_our_archive_can_be_read():
    kept = script.read_archive(script.RESULTS)
    assert {"evidence/trap.csv", "diagnose_minilm/summary.json"} <= kept.keys()
