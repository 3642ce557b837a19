"""The forces of a loss on the sphere, against finite differences of the loss under rotation of an anchor."""

import numpy as np
import programs
import pytest
import torch
import torch.nn.functional as F

script = programs.script("research/pull_and_push.py")


@pytest.mark.parametrize("name", script.LOSSES)
def test_forces_are_what_the_loss_changes_by_when_an_anchor_is_turned(name):
    torch.manual_seed(0)
    z_i = torch.randn(40, 8, dtype=torch.float64)
    z_j = z_i + 0.3 * torch.randn(40, 8, dtype=torch.float64)
    loss = script.LOSSES[name]
    found = script.forces(loss, z_i, z_j)
    unit = F.normalize(torch.cat([z_i, z_j]))
    own, positive = torch.eye(80, dtype=torch.bool), torch.arange(80).roll(40).unsqueeze(1)
    asked = script.settled(loss, z_i, z_j)  # lam and beta have no gradient

    def value(scores):
        logits = asked.link.logit(1 - scores).masked_fill(own, -torch.inf)
        logits = logits.scatter(1, positive, asked.positive.logit(1 - scores).gather(1, positive))
        return logits.logsumexp(1) - logits.gather(1, positive).squeeze(1)

    def change(towards):
        """Derivative of each anchor's loss by the angle to one candidate, in radians."""
        angle = (unit @ unit.T).gather(1, towards).clamp(-1, 1).acos()
        up, down = ((unit @ unit.T).scatter(1, towards, (angle + step).cos()) for step in (1e-5, -1e-5))
        return (value(up) - value(down)) / 2e-5

    torch.testing.assert_close(change(positive).abs(), found.pull, rtol=1e-5, atol=1e-8)
    others = [torch.full((80, 1), column) for column in range(80)]
    kept = [
        torch.where((column == positive) | own.gather(1, column), 0.0, 1.0).squeeze(1) for column in others
    ]
    pushes = sum(change(column).nan_to_num().abs() * keep for column, keep in zip(others, kept, strict=True))
    torch.testing.assert_close(pushes, found.push, rtol=1e-4, atol=1e-6)


def test_a_table_is_written(tmp_path, capsys):
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(64, 8, generator=rng)
    near = z + 0.2 * torch.randn(64, 8, generator=rng)
    np.savez(tmp_path / "pairs.npz", z_i=z.numpy(), z_j=near.numpy())
    script.main([str(tmp_path / "pairs.npz"), "--batch", "32", "--results", str(tmp_path / "found")])
    text = (tmp_path / "found.md").read_text()
    assert text.count("\n| ") == 2 + len(script.LOSSES)
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 2 + len(script.LOSSES)
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "pairs.npz"), "--batch", "100"])
    assert "holds 64 pairs, fewer than a batch of 100" in capsys.readouterr().err
