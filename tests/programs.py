"""Start Python programs in tests: they fork from a process that has imported torch, which takes seconds."""

import atexit
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

# Slow imports of other packages only: before Python 3.13 the fork server cannot import from the test folders, except
# from tests/lean, which is on PYTHONPATH.
IMPORTED_ONCE = [
    "torch",
    "scipy.stats",
    "matplotlib.pyplot",
    "lightning_fabric",
    "sentence_transformers",
    "frozen",
]
ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")


def script(path):
    """A script of the repository as a module. It can import the scripts beside it, as when Python runs it."""
    folder = str((ROOT / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


class Program:
    """``python ARGUMENTS``: ``-c CODE``, ``-m MODULE`` or a file, followed by the program's own arguments.

    Like ``subprocess.Popen`` with both streams captured as text; ``OMP_NUM_THREADS`` sets its threads.
    """

    def __init__(self, *arguments, cwd=None, env=None):
        self._said = tempfile.TemporaryDirectory()
        self._streams = [Path(self._said.name, name) for name in ("out", "err")]
        where, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        words = [str(word) for word in arguments]
        self.process = FORKS.Process(
            target=_run, args=(words, where, environment, self._streams), daemon=True
        )
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.process.kill()

    def wait(self, timeout=120):
        """Wait for the end; return the exit status and both streams."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"the program did not end within {timeout} seconds"
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def run(*arguments, **options):
    """Run a program to its end; return the exit status and both streams."""
    return Program(*arguments, **options).wait()


def _run(words, where, environment, streams):
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(where)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    multiprocessing.current_process()._config["daemon"] = False  # daemons may not start processes
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), vars(_main()))
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            exec(compile(Path(words[0]).read_text(), words[0], "exec"), vars(_main(words[0])))
    finally:
        atexit._run_exitfuncs()  # a forked process skips them


def _main(file=None):
    """Install a new main module, also under the name that child processes import."""
    made = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    if file is not None:
        made.__file__ = file
    return made
