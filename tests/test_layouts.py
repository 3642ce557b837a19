"""Fields of problems other than the roles, which the tests of the losses cover."""

import pytest
import torch

from weince.layouts import Layout, problems


@pytest.mark.parametrize("candidates", ["views", "cross", "clip"])
def test_bfloat16_rows_come_along_as_they_are(candidates):
    z_i, z_j = torch.randn(2, 4, 3).bfloat16()
    both = torch.cat([z_i, z_j])
    wanted = {"views": [(both, both)], "cross": [(z_i, z_j)], "clip": [(z_i, z_j), (z_j, z_i)]}[candidates]
    for problem, rows in zip(problems(candidates, z_i, z_j), wanted, strict=True):
        torch.testing.assert_close(problem.raw, rows, rtol=0, atol=0)


@pytest.mark.parametrize("narrow", [(), (0,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_they_come_where_all_are_bfloat16(narrow):
    given = [z.bfloat16() if index in narrow else z for index, z in enumerate(torch.randn(3, 4, 3))]
    (problem,) = problems("cross", *given[:2], negatives=given[2])
    if len(narrow) < 3:
        assert problem.raw is None
    else:
        torch.testing.assert_close(problem.raw, (given[0], torch.cat(given[1:])), rtol=0, atol=0)


def test_ids_of_32_bits_are_the_same():
    z, ids = torch.randn(3, 4, 3), torch.tensor([0, 1, 0, 2])
    narrow, wide = (problems("cross", *z[:2], negatives=z[2], ids=i)[0] for i in (ids.int(), ids))
    assert narrow.of_anchor["id"].tolist() == wide.of_anchor["id"].tolist()
    assert narrow.of_candidate["id"].tolist() == wide.of_candidate["id"].tolist()


@pytest.mark.parametrize("name", ["ids", "labels", "ignore"])
def test_what_lies_on_another_device_is_named(name):
    layout = "labels" if name == "labels" else "cross"
    given = torch.zeros(4, 4, dtype=torch.bool) if name == "ignore" else torch.arange(4)
    labels = {"labels": torch.arange(4)} if layout == "labels" else {"z_j": torch.randn(4, 3)}
    with pytest.raises(ValueError, match=f"{name} must be on cpu, like the embeddings; got meta"):
        problems(layout, torch.randn(4, 3), **{**labels, name: given.to("meta")})


Z = torch.randn(4, 3)
HOLE = Z.masked_fill(Z.eq(Z[2, 1]), torch.nan)


@pytest.mark.parametrize(
    ("candidates", "given", "error", "said"),
    [
        ("views", {"z_i": Z[0], "z_j": Z[0]}, ValueError, r"z_i must have shape \(rows, d\) .*; got \(3,\)"),
        ("views", {"z_i": Z[:, :0], "z_j": Z[:, :0]}, ValueError, r"with d >= 1; got \(4, 0\)"),
        ("views", {"z_i": Z.long(), "z_j": Z}, TypeError, "z_i must be a floating point tensor; got torch.int64"),
        ("views", {"z_i": Z, "z_j": Z.tolist()}, TypeError, "z_j must be a torch.Tensor; got list"),
        ("views", {"z_i": Z, "z_j": Z[:3]}, ValueError, r"the same shape, .*; got \(4, 3\) and \(3, 3\)"),
        ("cross", {"z_i": Z[:3], "z_j": Z}, ValueError, r"got .* and \(4, 3\): .* further candidates as negatives="),
        ("cross", {"z_i": Z, "z_j": Z[:, :2]}, ValueError, r"z_j must match z_i .*; got \(4, 2\)"),
        ("cross", {"z_i": Z, "z_j": Z, "negatives": Z[:, :2]}, ValueError, "negatives must match z_i"),
        ("cross", {"z_i": Z, "z_j": HOLE}, ValueError, "z_j must be finite; .* in 1 of 4 rows, first in row 2"),
        ("views", {"z_i": Z[:1], "z_j": Z[:1]}, ValueError, "wanted at least 2 pairs, .*; got 1 "),
        ("cross", {"z_i": Z[:1], "z_j": Z[:1]}, ValueError, "wanted at least 1 anchor and 2 candidates; got "),
        ("views", {"z_i": [Z, Z]}, TypeError, "z_i must be a torch.Tensor; got list"),
        ("views", {"z_i": Z}, TypeError, 'candidates="views" wants two tensors .*; got z_i alone'),
        ("labels", {"z_i": Z}, TypeError, 'candidates="labels" wants labels='),
        ("labels", {"z_i": Z, "z_j": torch.arange(4)}, TypeError, 'candidates="labels" wants labels='),
        ("cross", {"z_i": Z, "z_j": Z, "labels": torch.arange(4)}, TypeError, r"wants labels=\(of_q.*; got Tensor"),
        ("views", {"z_i": Z, "z_j": Z, "negatives": Z}, TypeError, 'goes with candidates="cross" or "clip"; got '),
        ("cross", {"z_i": Z, "z_j": Z, "ids": Z[:, 0]}, TypeError, "ids must be an integer tensor .*; got torch.fl"),
        ("cross", {"z_i": Z, "z_j": Z, "ids": Z[:, 0] + 0j}, TypeError, "integer tensor .*; got torch.complex64"),
        ("cross", {"z_i": Z, "z_j": Z, "ids": torch.arange(5)}, ValueError, r"shape \(4,\); got \(5,\)"),
        ("cross", {"z_i": Z, "z_j": Z, "ignore": Z @ Z.T}, TypeError, r"boolean tensor of shape \(4, 4\); got"),
        ("cross", {"z_i": Z, "z_j": Z, "ignore": Z > 0}, ValueError, r"\(n, n \+ m\) .*; got \(4, 3\)"),
        ("views", {"z_i": Z, "z_j": Z, "ignore": Z @ Z.T > 0}, ValueError, r"\(8, 8\), .*; got \(4, 4\)"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_contrasted(candidates, given, error, said):
    with pytest.raises(error, match=said):
        problems(candidates, **given)


@pytest.mark.parametrize("check", [None, True, False])
def test_whether_values_are_checked(check):
    """By default they are, on the CPU."""
    rows = torch.full((4, 3), torch.nan)
    if check is False:
        problems(Layout("views", check_finite=check), rows, rows)
        return
    with pytest.raises(ValueError, match="must be finite; got NaN or inf in 4 of 4 rows, first in row 0"):
        problems(Layout("views", check_finite=check), rows, rows)


def test_negatives_without_ids_compete_with_every_id():
    ids = torch.tensor([-1, 0, 1, 0])
    (problem,) = problems("cross", Z, Z, negatives=Z, ids=ids)
    hidden = problem.leave_out(torch.zeros(4, 8), problem.negatives, 1.0)
    assert hidden[:, 4:].sum() == 0
    assert hidden[:, :4].tolist() == (ids.unsqueeze(1) == ids).float().tolist()
