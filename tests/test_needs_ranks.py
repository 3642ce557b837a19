"""What people need of a loss over two ranks, whose average is what one process computes of the whole batch."""

import needs_ranks
import pytest
import ranks
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.posix  # ranks need a fork server


@pytest.fixture(scope="module")
def both(made_once):
    def compute(folder):
        processes = ranks.start(2, folder, needs_ranks.compare)
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]

    return ranks.results(2, made_once("needs_2_ranks", compute))


@pytest.mark.parametrize("engine", ["dense", "chunked", "ring"])
@pytest.mark.parametrize("case", needs_ranks.CASES)
def test_the_average_is_that_of_one_process(both, case, engine):
    value, gradients = needs_ranks.step(case, None)
    values, each = zip(*(rank["steps"][case, engine] for rank in both), strict=True)
    assert_close(torch.stack(values).mean(), value, rtol=1e-10, atol=1e-12)
    for wanted, *found in zip(gradients, *each, strict=True):
        assert_close(torch.stack(found).mean(0), wanted, rtol=1e-9, atol=1e-11)


def test_learned_parameters_that_differ_are_an_error(both):
    """Without DDP they would drift apart in silence."""
    for rank in both:
        start, functions, drifting = rank["errors"]
        for said in (start, drifting):
            assert "wanted the same learned parameters of the loss on all ranks" in said
            assert "wrap the loss in DistributedDataParallel" in said
        assert functions.startswith("wanted the same loss on all ranks; got LinkLoss(")
