"""Compare 1, 2 and 4 processes under DistributedDataParallel with one process on the whole batch."""

from functools import cache

import pytest
import ranks
import torch

from weince import InfoNCELoss, WeinceLoss, distributed
from weince.distributed import is_spread

pytestmark = pytest.mark.posix  # ranks need a fork server


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request, made_once):
    """Number of ranks, and the results of each. Starting ranks is slow, so one start computes everything."""
    world = request.param

    def compute(folder):
        processes = ranks.start(world, folder, "compare")
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * world

    return world, ranks.results(world, made_once(f"{world}_ranks", compute))


@cache
def alone(case):
    """Results of one process on the whole batch."""
    return ranks.step(case, slice(None), lambda model: model)


@pytest.mark.parametrize("case", [case for case in ranks.cases() if case[3] != "none"], ids=str)
def test_ranks_average_to_one_process(found, case):
    _, each = found
    wanted = alone(case)
    tolerance = {"rtol": 1e-11, "atol": 1e-12} if case[5] == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    mean = torch.stack([rank[case]["loss"] for rank in each]).mean()
    torch.testing.assert_close(mean, wanted["loss"], **tolerance)
    for rank in each:
        torch.testing.assert_close(rank[case]["gradients"], wanted["gradients"], **tolerance)
        torch.testing.assert_close(rank[case]["buffers"], wanted["buffers"], **tolerance)
    assert any(grad.abs().max() > 1e-3 for grad in wanted["gradients"])


@pytest.mark.parametrize(
    "case", [c for c in ranks.cases() if c[0] == "paper" and c[5] == torch.float64], ids=str
)
def test_statistics_are_those_of_the_whole_batch(found, case):
    """K counts the candidates of all ranks, and the pivot uses the anchors of all ranks."""
    world, each = found
    wanted = alone(case)["stats"]
    for rank, span in zip(each, ranks.spans(case[4], world), strict=True):
        for name, values in rank[case]["stats"].items():
            whole = wanted[name]
            own = torch.cat([half[span] for half in whole.split(ranks.PAIRS)])  # one part per view
            torch.testing.assert_close(values, own, rtol=1e-11, atol=1e-12)
    assert float(wanted["lam"].max()) > 0.01


@pytest.mark.parametrize("case", [case for case in ranks.cases() if case[3] == "none"], ids=str)
def test_losses_one_by_one_are_those_of_the_whole_batch(found, case):
    """Single losses are not scaled, so DDP's gradient is that of the total divided by the number of ranks."""
    world, each = found
    wanted = alone(case)
    for rank, span in zip(each, ranks.spans(case[4], world), strict=True):
        own = torch.cat([half[span] for half in wanted["loss"].split(ranks.PAIRS)])
        torch.testing.assert_close(rank[case]["loss"], own, rtol=1e-11, atol=1e-12)
        gradients = [world * grad for grad in rank[case]["gradients"]]
        torch.testing.assert_close(gradients, wanted["gradients"], rtol=1e-11, atol=1e-11)


def test_the_cached_step_too(found):
    _, each = found
    model = ranks.Model("InfoNCE", "views", "dense", "mean", torch.float64).encoder
    inputs = ranks.batch("views", torch.float64)
    loss = WeinceLoss()(model(inputs["x_i"]), model(inputs["x_j"]))
    loss.backward()
    torch.testing.assert_close(torch.stack([rank["cached"]["loss"] for rank in each]).mean(), loss.detach())
    for rank in each:
        wanted = [p.grad for p in model.parameters()]
        torch.testing.assert_close(rank["cached"]["gradients"], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gather", [True, "ring"])
def test_a_slope_of_the_batch_alone(found, gather):
    world, each = found
    wanted = ranks.slope(gather, slice(None))
    mean = torch.stack([rank["slope"][gather]["loss"] for rank in each]).mean()
    torch.testing.assert_close(mean, wanted["loss"], rtol=1e-11, atol=1e-12)
    gradient = torch.cat([rank["slope"][gather]["gradient"] for rank in each]) / world
    torch.testing.assert_close(gradient, wanted["gradient"], rtol=1e-11, atol=1e-12)
    for rank in each:
        torch.testing.assert_close(rank["slope"][gather]["slope"], wanted["slope"], rtol=1e-11, atol=1e-12)
        assert rank["slope"][gather]["sampled"] == each[0]["slope"][gather]["sampled"]
        assert rank["slope"][gather]["sampled"] not in (4, wanted["slope"])
    assert abs(float(wanted["slope"]) - 4) > 1e-3  # the slope moved


def test_a_ring_never_holds_all_candidates(found):
    """Each rank has 40 rows of width 64; the ring never holds the rows of all ranks at once."""
    world, each = found
    for rank in each:
        assert rank["largest"][True] >= world * 40 * 64
        assert rank["largest"]["ring"] <= 40 * (32 + 40)  # tails of 32, merged with a block of 40


def test_every_rank_hears_why(found):
    world, each = found
    if world == 1:
        error, *_ = each[0]["errors"]
        assert error.startswith("wanted at least 2 pairs, so that there are negatives; got 0")
        return
    for rank in each:
        empty, *ignored = rank["errors"]
        assert empty == f"wanted at least one row on every rank; got none on rank 0 of {world}"
        assert len(ignored) == 2
        for ignore in ignored:
            assert "a column for each of the 6 candidates of this rank" in ignore
            assert "candidates of all ranks in their order; got shape (6, 7)" in ignore


@pytest.mark.parametrize("gather", [True, "ring"])
def test_ranks_that_do_not_do_the_same_hear_it(found, gather):
    """Otherwise the ranks would wait for each other forever, or average losses with different settings."""
    world, each = found
    for rank, said in enumerate(one["unlike"][gather] for one in each):
        assert (
            said.pop("anchors")
            == "temperature must hold one value, or one for each of 6 anchors; got shape (5,)"
        )
        if world == 1:
            assert said == {}
            continue
        width, dtype, ids, *losses = said.values()
        assert width == f"wanted the same width of the embeddings on all ranks; got {[4] * (world - 1) + [3]}"
        assert dtype == f"wanted the same precision in bits on all ranks; got {[32] * (world - 1) + [64]}"
        names = "id, position, positive" if rank == world - 1 else "position, positive"
        assert ids == f"wanted the same roles of pairs on all ranks; got {names} on this one, another on some"
        last = rank == world - 1
        own = [
            f"temperature={0.1 if last else 0.5}",
            f"tail={'TailConfig(' if last else None}",
            f"hardness={0.5 if last else 1.0}",
            f"numbers=({2 if last else 1},)",
            f"link=SoftmaxLink(temperature={0.2 if last else 0.3})",
            *([f"gather={True if last else gather!r}"] if gather == "ring" else []),
            f"training={last}",
        ]
        for message, setting in zip(losses, own, strict=True):
            assert message.startswith("wanted the same loss on all ranks; got ")
            assert setting in message


@pytest.mark.parametrize("gather", [True, "ring"])
def test_how_rows_lie_in_memory_does_not_matter(found, gather):
    for rank in found[1]:
        usual, transposed = rank["transposed"][gather]
        torch.testing.assert_close(usual, transposed)


@pytest.mark.parametrize("gather", [True, "ring"])
def test_a_second_derivative_is_refused(found, gather):
    for rank in found[1]:
        assert "have a first derivative only" in rank["second"][gather]


@pytest.mark.parametrize("gather", [True, "ring"])
def test_tensors_and_functions_may_differ_from_rank_to_rank(found, gather):
    for rank in found[1]:
        assert rank["own"][gather].isfinite()


def test_sums_over_different_numbers_of_negatives(found):
    for rank in found[1]:
        torch.testing.assert_close(rank["hardest"]["ring"], rank["hardest"][True])


def test_a_ring_keeps_the_digits_of_small_numbers(found):
    for rank in found[1]:
        (gradient, rho), (in_ring, rho_in_ring) = (rank["extremes"][gather] for gather in (True, "ring"))
        torch.testing.assert_close(in_ring, gradient, rtol=1e-6, atol=0)
        torch.testing.assert_close(rho_in_ring, rho, rtol=1e-4, atol=0)


@pytest.mark.parametrize("gather", [True, "ring"])
def test_the_slope_of_a_batch_is_fitted_to_exact_shortfalls(found, gather):
    wanted = ranks.batch_slope(*(z.double() for z in ranks.twins()))
    for rank in found[1]:
        torch.testing.assert_close(rank["twins"][gather], wanted, rtol=1e-5, atol=0)


def test_without_gather_each_for_itself(found):
    for rank in found[1]:
        loss, z_i, z_j = rank["alone"]
        torch.testing.assert_close(loss, InfoNCELoss()(z_i, z_j))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_is_reported_within_the_timeout(tmp_path, how):
    processes = ranks.start(2, tmp_path, how, timeout=4)
    processes[0].join(60)
    processes[1].kill()
    found = torch.load(tmp_path / "0.pt")
    assert found["said"].startswith("weince: rank 0 of 2 was left alone while exchanging the sizes")
    assert "another rank failed, ended or did not come within the process group's timeout" in found["said"]
    assert found["seconds"] < 8


def test_a_ring_chooses_its_own_engine():
    with pytest.raises(ValueError, match="goes with engine=\"auto\"; got 'dense'"):
        InfoNCELoss(gather="ring", engine="dense")


def test_one_process_is_not_spread():
    assert not is_spread()


def test_a_rank_without_memory_does_not_blame_the_others():
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"), distributed._together("adding up"):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")
