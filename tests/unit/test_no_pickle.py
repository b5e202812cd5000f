"""Nothing in the package executes what it reads: no pickles, no code from data."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SOURCES = [path for top in ("daemon", "client", "kernels") for path in (ROOT / top).rglob("*.py")]
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "copyreg",
    "yaml", "jsonpickle", "multiprocessing",
}  # fmt: skip
OWN_CHILDREN = "daemon/latentd/commands/latency.py"
"""Its clients are its own processes: what they pickle for each other never leaves them."""
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch.load", "torch.save", "np.load", "np.save", "np.savez", "numpy.load", "torch.jit.load",
    "zmq.recv_pyobj", "recv_pyobj", "send_pyobj",
}  # fmt: skip


def faults(tree: ast.AST) -> Iterator[str]:
    """What in a module could execute data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        yield from (name for name in names if name.partition(".")[0] in MODULES or name in METHODS)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_method = called in METHODS or called.rpartition(".")[2] in METHODS
            if called in CALLS or is_method:
                yield called
            yield from ("allow_pickle" for word in node.keywords if word.arg == "allow_pickle")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')",
        "from torch import load", "np.frombuffer(b'', allow_pickle=True)", "sock.recv_pyobj()",
        "import joblib.memory",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(faults(ast.parse(source)))


def test_no_module_unpickles_or_evaluates_anything() -> None:
    assert len(SOURCES) > 200
    found = {str(p.relative_to(ROOT)): [*faults(ast.parse(p.read_text()))] for p in SOURCES}
    assert {name.partition(".")[0] for name in found.pop(OWN_CHILDREN)} == {"multiprocessing"}
    assert {path: names for path, names in found.items() if names} == {}
