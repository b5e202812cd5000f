"""The shape of the repository: import packages, versions, pins."""

import re
import tomllib
from pathlib import Path

import latentd_client
import latentd_kernels
from latentd_kernels.compiler import COMPILER_WHEELS

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "daemon": ["latentd"], "client": ["latentd_client", "latentd_openai"],
    "kernels": ["latentd_kernels"],
}  # fmt: skip


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["project"]
    return table


def test_no_top_folder_is_a_package() -> None:
    assert not [path for path in ROOT.glob("*/__init__.py")]


def test_each_top_folder_holds_the_packages_of_its_name() -> None:
    for folder, packages in PACKAGES.items():
        found = sorted(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))
        assert found == packages
        for package in packages:
            assert (ROOT / folder / package / "py.typed").is_file()


def test_the_packages_carry_the_version_of_the_distribution() -> None:
    assert {latentd_client.__version__, latentd_kernels.__version__} == {project()["version"]}


def test_a_bare_install_is_the_client_and_needs_no_torch() -> None:
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    assert {re.split(r"[<>=]", name)[0] for name in dependencies} == {"pyzmq", "msgpack", "numpy"}


def test_every_constraint_is_an_exact_version_and_named_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    names = [line.split("==")[0].lower().replace("_", "-") for line in pins]
    assert len(names) == len(set(names))


def test_the_compiler_wheels_are_pinned_alike_in_the_constraints() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(COMPILER_WHEELS) <= set(pins)
