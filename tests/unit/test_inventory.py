"""KERNELS.md: what is read from the sources, and that the committed page is current."""

from pathlib import Path

import pytest

from kernel_sources import make_sources, put_fake_nvcc_on_path
from latentd_kernels import build, inventory, manifest
from latentd_kernels.inventory import InventoryError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return make_sources(tmp_path / "csrc")


def collect(sources: Path) -> list[inventory.Block]:
    return inventory.collect(sources, sources.parent / "cubin")


def test_kernels_md_is_current() -> None:
    page = inventory.render(inventory.collect())
    assert inventory.PAGE.read_text() == page, "run `make inventory`"


def test_every_source_of_the_package_has_its_kernels_documented() -> None:
    documented = {block.source for block in inventory.collect()}
    sources = manifest.SOURCES.rglob("*.cu")
    assert documented == {path.relative_to(manifest.SOURCES).as_posix() for path in sources}


def test_a_block_is_read_with_its_continuation_lines(sources: Path) -> None:
    (block,) = inventory.parse(sources / "add.cu")
    assert block == inventory.Block(
        "add.cu",
        ("add",),
        "x[i] = x[i] + y[i].",
        "x, y [n] float32.",
        "once, to float32.",
        "grid (n, 1, 1), 256 threads.",
    )


def test_the_page_lists_sources_and_kernels_in_order(sources: Path) -> None:
    page = inventory.render(collect(sources))
    assert page.index("## add.cu") < page.index("### `add`") < page.index("## scale.cu")
    assert "- rounds: once, to float32.\n" in page


@pytest.mark.parametrize("field", inventory.FIELDS)
def test_a_block_without_a_field_is_refused_by_name(sources: Path, field: str) -> None:
    text = (sources / "scale.cu").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(f"// {field}:")]
    (sources / "scale.cu").write_text("\n".join(lines))
    with pytest.raises(InventoryError, match=rf"scale\.cu: the block of scale has no `{field}:`"):
        collect(sources)


def test_an_entry_point_without_a_block_is_named(sources: Path) -> None:
    (sources / "bare.cu").write_text(
        'extern "C" __global__ void\n__launch_bounds__(kThreads, 2) bare(const Foo foo,\n int n) {}'
    )
    with pytest.raises(InventoryError, match="entry points without a block: bare"):
        collect(sources)


def test_a_block_without_an_entry_point_is_named_once_the_cubins_are_built(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    text = (sources / "add.cu").read_text()
    (sources / "add.cu").write_text(text.replace("// kernel add:", "// kernel add, gone:"))
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    with pytest.raises(InventoryError, match="blocks without an entry point: gone"):
        collect(sources)


def test_entry_points_that_a_macro_makes_are_known_from_the_cubins(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    (sources / "made.cu").write_text("MAKE(x) // __global__ void made_x\n")
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    with pytest.raises(InventoryError, match="without a block: made_x"):
        collect(sources)


def test_a_star_stands_for_a_family_of_entry_points(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_fake_nvcc_on_path(tmp_path / "bin", monkeypatch)
    (sources / "made.cu").write_text(
        "// kernel made_*: moves.\n// shapes: x.\n// rounds: none.\n// launch: grid (1, 1, 1).\n"
        "MAKE(x) // __global__ void made_x\nMAKE(y) // __global__ void made_y\n"
    )
    build.build(["sm_90a"], tmp_path / "cubin", sources)
    assert ("made_*",) in [block.names for block in collect(sources)]


def test_a_kernel_documented_twice_is_named(sources: Path) -> None:
    (sources / "scale.cu").write_text((sources / "add.cu").read_text())
    with pytest.raises(InventoryError, match="documented twice: add"):
        collect(sources)


def test_neither_comments_nor_macros_count_as_entry_points(tmp_path: Path) -> None:
    source = tmp_path / "x.cu"
    source.write_text(
        "#define MAKE(NAME) \\\n"
        '  extern "C" __global__ void __launch_bounds__(128) make_##NAME(float* x, \\\n'
        "       int n) { body(x); }\n"
        '// extern "C" __global__ void commented(int n) {\n'
        'extern "C" __global__ void __launch_bounds__(64) real(int n) {}\n'
    )
    assert inventory.entry_points(source) == {"real"}
