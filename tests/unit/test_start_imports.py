import subprocess
import sys

SCRIPT = """
import sys
import torch
from latentd import demo, memory
from latentd.checkpoint import inspect
from latentd.options import EngineOptions
before = set(sys.modules)
config = inspect(demo.model_dir()).config
options = EngineOptions(demo.model_dir()).for_device("cpu")
memory.plan(config, options, torch.device("cpu"), None)
late = {name.split(".")[0] for name in set(sys.modules) - before}
assert "sympy" not in late, late
"""


def test_checking_and_planning_import_no_symbolic_mathematics() -> None:
    """Some operations on meta tensors do, and a start pays a second and more for it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
