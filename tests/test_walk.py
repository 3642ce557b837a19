"""The way of one step is short: a reader of the library can follow it."""

import programs

walk = programs.script("benchmarks/walk.py")


def test_one_infonce_step_passes_few_files_and_functions():
    found = walk.calls(walk.LOSSES["InfoNCELoss(0.5)"])
    assert len({file for file, _ in found}) <= 8
    assert len(found) <= 45
