"""Several commands in one process."""

from programs import run


def in_turn(*commands):
    return run("-m", "weince.lab.in_turn", *commands)


def test_commands_run_one_after_the_other():
    done = in_turn("weince --version", "weince reproduce --list")
    assert done.returncode == 0, done.stderr
    first, *tables = done.stdout.splitlines()
    assert first.startswith("weince ")
    assert any(line.startswith("headline ") for line in tables)


def test_a_command_that_fails_is_the_last_and_gives_its_status():
    done = in_turn("weince evaluate 'no such folder'", "weince --version")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "weince: no such folder is not the folder of a run: it has no run.yaml"
    ]
