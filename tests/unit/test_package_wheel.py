"""The wheel that `make test` has just built, opened, and imported in a bare environment."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from latentd_kernels import build, manifest

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("LATENTD_WHEEL")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="LATENTD_WHEEL names no folder: `make test`")


@pytest.fixture(scope="module")
def wheel() -> Path:
    (path,) = (ROOT / str(FOLDER)).glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and what it requires, no extra."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=python.parent, env=clean,
        timeout=60, check=False,
    )  # fmt: skip


def test_the_wheel_is_pure_and_names_what_each_extra_adds(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "extra == 'daemon'" in text


def test_the_wheel_carries_one_image_a_source_and_architecture_and_nothing_else(
    wheel: Path,
) -> None:
    sources = manifest.source_hashes(manifest.SOURCES)
    expected = {
        f"latentd_kernels/cubin/{arch}/{name}"
        for arch in build.ARCHITECTURES
        for name in (
            manifest.FILE_NAME,
            *(
                f"{source[:-3].replace('/', '_')}.{'ptx' if arch[0] == 'c' else 'cubin'}"
                for source in sources
                if manifest.compiled_for(source, arch)
            ),
        )
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if "cubin" in name} == expected
    assert len(names) == len(set(names))


def test_no_kernel_spills_registers_on_any_architecture(wheel: Path) -> None:
    spilling = {}
    with zipfile.ZipFile(wheel) as archive:
        for arch in build.ARCHITECTURES:
            body = json.loads(archive.read(f"latentd_kernels/cubin/{arch}/{manifest.FILE_NAME}"))
            for name, kernel in body["kernels"].items():
                if kernel["spill_stores"] or kernel["spill_loads"]:
                    spilling[arch, name] = kernel["spill_stores"], kernel["spill_loads"]
    assert spilling == {}


def test_every_image_in_the_installed_wheel_verifies(bare_python: Path) -> None:
    code = (
        "import json; from latentd_kernels import build, manifest;"
        "print(json.dumps({a: sorted(manifest.load(manifest.CUBIN_DIR, a).kernels)"
        " for a in build.ARCHITECTURES}))"
    )
    done = run(bare_python, "-c", code)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    hopper = set(kernels.pop("sm_90a"))
    (portable,) = {frozenset(names) for names in kernels.values()}
    assert hopper > portable


def test_the_wheel_carries_the_bundled_model_and_the_unit_files(bare_python: Path) -> None:
    done = run(
        bare_python, "-c",
        "import pathlib, latentd; demo = pathlib.Path(latentd.__file__).parent / 'demo';"
        "print(len(list(demo.rglob('*.safetensors'))), len(list(demo.rglob('config.json'))),"
        " len(list((demo.parent / 'systemd').iterdir())))",
    )  # fmt: skip
    models, configs, units = map(int, done.stdout.split())
    assert (models >= 1, configs >= 1) == (True, True)
    assert units == len(list((ROOT / "systemd").iterdir()))


def test_the_installed_command_installs_the_units(bare_python: Path, tmp_path: Path) -> None:
    where = ("--root", str(tmp_path), "--program", "/bin/sh")
    done = run(bare_python, "-m", "latentd", "install-units", *where)
    assert (done.returncode, done.stderr) == (0, "")
    unit = (tmp_path / "etc/systemd/system/latentd.service").read_text()
    assert "ExecStart=/bin/sh serve " in unit


def test_the_client_imports_without_torch_cuda_or_safetensors(bare_python: Path) -> None:
    done = run(
        bare_python, "-c",
        "import sys, importlib.util; from latentd_client import Client, AsyncClient, text;"
        "print([m for m in ('torch', 'cuda', 'safetensors', 'tokenizers')"
        " if m in sys.modules or importlib.util.find_spec(m)])",
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_command_says_its_version_without_torch(bare_python: Path) -> None:
    done = run(bare_python, "-m", "latentd", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, "latentd 0.1.0")
    assert (bare_python.parent / "latentd").is_file()


def test_serve_without_torch_names_the_missing_extra(bare_python: Path) -> None:
    done = run(bare_python, "-m", "latentd", "serve", "--model", ".")
    assert done.returncode != 0
    assert "pip install '.[daemon]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_door_without_its_packages_names_the_missing_extra(bare_python: Path) -> None:
    done = run(bare_python, "-m", "latentd_openai")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "pip install '.[openai]'" in done.stderr
    assert (bare_python.parent / "latentd-openai").is_file()


def test_the_suite_and_the_wheel_are_of_one_version(bare_python: Path) -> None:
    done = run(bare_python, "-c", "import latentd_client; print(latentd_client.__version__)")
    here = subprocess.run(
        [sys.executable, "-c", "import latentd_client; print(latentd_client.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == here.stdout
