"""Fields of contests other than the roles, which the tests of the losses cover."""

import pytest
import torch

from weince.candidates import contests


@pytest.mark.parametrize("candidates", ["views", "cross", "clip"])
def test_bfloat16_rows_come_along_as_they_are(candidates):
    z_i, z_j = torch.randn(2, 4, 3).bfloat16()
    both = torch.cat([z_i, z_j])
    wanted = {"views": [(both, both)], "cross": [(z_i, z_j)], "clip": [(z_i, z_j), (z_j, z_i)]}[candidates]
    for contest, rows in zip(contests(candidates, z_i, z_j), wanted, strict=True):
        torch.testing.assert_close(contest.raw, rows, rtol=0, atol=0)


@pytest.mark.parametrize("narrow", [(), (0,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_they_come_where_all_are_bfloat16(narrow):
    given = [z.bfloat16() if index in narrow else z for index, z in enumerate(torch.randn(3, 4, 3))]
    (contest,) = contests("cross", *given[:2], negatives=given[2])
    if len(narrow) < 3:
        assert contest.raw is None
    else:
        torch.testing.assert_close(contest.raw, (given[0], torch.cat(given[1:])), rtol=0, atol=0)


def test_ids_of_32_bits_are_the_same():
    z, ids = torch.randn(3, 4, 3), torch.tensor([0, 1, 0, 2])
    narrow, wide = (contests("cross", *z[:2], negatives=z[2], ids=i)[0].ids for i in (ids.int(), ids))
    assert [i.tolist() for i in narrow] == [i.tolist() for i in wide]


@pytest.mark.parametrize("name", ["ids", "labels", "ignore"])
def test_what_lies_on_another_device_is_named(name):
    layout = "labels" if name == "labels" else "cross"
    given = torch.zeros(4, 4, dtype=torch.bool) if name == "ignore" else torch.arange(4)
    labels = {"labels": torch.arange(4)} if layout == "labels" else {"z_j": torch.randn(4, 3)}
    with pytest.raises(ValueError, match=f"{name} must be on cpu, like the embeddings; got meta"):
        contests(layout, torch.randn(4, 3), **{**labels, name: given.to("meta")})
