"""The queue of earlier embeddings."""

import needs_ranks
import pytest
import ranks
import torch
from torch.testing import assert_close

from weince import InfoNCELoss, Queue


def test_it_holds_the_newest_rows_in_their_order():
    queue, pushed = Queue(7), torch.randn(5, 3, 4)
    assert queue.rows is None
    for batch, rows in enumerate(pushed):
        queue.push(rows, torch.arange(3) + 3 * batch)
        wanted = pushed[: batch + 1].flatten(0, 1)[-7:]
        assert torch.equal(queue.rows, wanted)
        assert queue.ids.tolist() == list(range(3 * batch + 3))[-7:]


def test_a_batch_larger_than_the_queue():
    queue, rows = Queue(4), torch.randn(6, 3)
    queue.push(rows)
    assert torch.equal(queue.rows, rows[2:])


def test_the_loss_sees_the_rows_as_negatives_but_for_equal_ids():
    torch.manual_seed(0)
    query, key, old = torch.randn(3, 5, 4, dtype=torch.float64).unbind()
    ids = torch.arange(5)
    queue = Queue(10)
    queue.push(old, torch.tensor([0, 7, 8, 9, 4]))
    loss = InfoNCELoss(0.2, candidates="cross", reduction="none")
    got = loss(query.requires_grad_(), key, negatives=queue.rows, ids=queue.ids_with(ids))
    scores = (
        torch.nn.functional.normalize(query) @ torch.nn.functional.normalize(torch.cat([key, old])).T / 0.2
    )
    alike = ids.unsqueeze(1) == torch.cat([torch.full((5,), -1), queue.ids])
    wanted = torch.nn.functional.cross_entropy(scores.masked_fill(alike, -torch.inf), ids, reduction="none")
    assert_close(got, wanted)
    assert_close(*(torch.autograd.grad(value.sum(), query) for value in (got, wanted)))


def test_rows_without_ids_equal_no_one():
    queue = Queue(4)
    queue.push(torch.randn(2, 3))
    queue.push(torch.randn(2, 3), torch.tensor([0, 1]))
    z = torch.randn(2, 3)
    loss = InfoNCELoss(candidates="cross")
    with_ids = loss(z, z.flip(0), negatives=queue.rows[:2], ids=queue.ids_with(torch.arange(2))[:4])
    assert_close(with_ids, loss(z, z.flip(0), negatives=queue.rows[:2]))


def test_the_state_dict_carries_the_rows():
    queue, again = Queue(5), Queue(5)
    queue.push(torch.randn(4, 3), torch.arange(4))
    again.load_state_dict(queue.state_dict())
    assert torch.equal(again.rows, queue.rows)
    assert torch.equal(again.ids, queue.ids)
    later = torch.randn(3, 3)
    for each in (queue, again):
        each.push(later)
    assert torch.equal(again.rows, queue.rows)


def test_rows_carry_no_gradient():
    queue, rows = Queue(5), torch.randn(4, 3, requires_grad=True)
    queue.push(rows)
    assert not queue.rows.requires_grad
    before = queue.rows.clone()
    rows.data.zero_()
    assert torch.equal(queue.rows, before)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Queue(0), "size must be an int of at least 1; got 0"),
        (lambda: Queue(4, gather="ring"), "gather must be True or False; got 'ring'"),
        (
            lambda: Queue(4).push(torch.arange(3)),
            r"rows must be floating point rows \(n, d\); got torch.int64 \(3,\)",
        ),
        (
            lambda: Queue(4).push(torch.randn(3, 2), torch.arange(2)),
            r"ids must be integers of shape \(3,\); got",
        ),
    ],
)
def test_mistakes(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_rows_of_another_width():
    queue = Queue(4)
    queue.push(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"the width 3 of those before; got \(2, 5\)"):
        queue.push(torch.randn(2, 5))


@pytest.mark.posix
def test_all_ranks_hold_the_rows_of_all(tmp_path):
    processes = ranks.start(2, tmp_path, needs_ranks.queues)
    for process in processes:
        process.join(60)
    first, second = ranks.results(2, tmp_path)
    assert torch.equal(first["all"], second["all"])
    assert first["all"].tolist() == [[0.0], [0.0], [1.0], [1.0], [1.0]]
    assert [rank["own"].tolist() for rank in (first, second)] == [[[0.0], [0.0]], [[1.0], [1.0], [1.0]]]
