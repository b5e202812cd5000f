"""What the contract of the kernels forbids, looked for in their sources."""

from __future__ import annotations

import re

import pytest

from latentd_kernels import experts_resident as resident
from latentd_kernels import geometry, head_tiles, limits, scores
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.expand_forms import ROW_SMEM
from latentd_kernels.experts import FEW_ROWS
from latentd_kernels.manifest import ARCH_FOLDERS, SOURCES
from latentd_kernels.moe import MAX_EXPERTS, MAX_MOE_ROWS, MAX_TOP_K

WAITING = {  # device functions that call pdl_wait for their kernel
    "append_rows": "append.cuh",
    "norm_row": "elementwise.cu",
    "skinny_product": "product.cuh",
    "tiled_product": "product.cuh",
    "produce": "hopper/linear.cuh",
    "attend_chains": "hopper/landed_output.cu",
    "load_rows": "hopper/experts.cu",
    "multiply_all": "hopper/experts.cu",
    "norm_one_row": "hopper/experts_one.cuh",
}
LATER = {
    "attend_hopper_wide",
    "moe_experts_few",
    "moe_experts_one",
    "run",  # of hopper/linear.cu
}  # let the next kernel launch in the midst of their work
LATE = "pdl_wait_then_launch();"
CALLS = {"pdl_wait", "pdl_wait_then_launch", *WAITING}
ENTRY = 'extern "C" __global__'


def code_of(name: str) -> str:
    """A source without comments and line continuations."""
    return re.sub(r"//[^\n]*|\\\n", "", (SOURCES / name).read_text(encoding="utf-8"))


def block_at(code: str, start: int) -> str:
    """From `start`, which lies inside a block, to the end of that block."""
    depth = 1
    for place in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[place], 0)
        if depth == 0:
            return code[start:place]
    raise AssertionError("a block without an end")


def without_lambdas(body: str) -> str:
    """A function's body without those of the lambdas in it: their returns are not its own."""
    while found := re.search(r"\]\s*\([^()]*\)\s*\{", body):
        inner = block_at(body, found.end())
        body = body[: found.start()] + body[found.end() + len(inner) + 1 :]
    return body


def kernels(name: str) -> dict[str, str]:
    """Bodies behind pdl_launch(), by the name of the function that calls it, and whole bodies of
    functions that call pdl_wait_then_launch()."""
    code = code_of(name)
    bodies = {
        found[1]: without_lambdas(found[2])
        for found in re.finditer(r"(\w+)\([^(){}]*\) \{\n(.*?)^\}", code, re.DOTALL | re.MULTILINE)
        if LATE in found[2]
    }
    for found in re.finditer(r"\bpdl_launch\(\);", code):
        header = re.findall(r"(\w+)\s*\([^(){}]*\)\s*\{\s*$", code[: found.start()])
        if header:
            bodies[header[-1]] = without_lambdas(block_at(code, found.end()))
            continue
        *_, around = re.finditer(r"(\w+)\([^(){}]*\) \{\n", code[: found.start()])
        assert around[1] in LATER, f"{name}: pdl_launch() is not the first thing in its function"
        bodies[around[1]] = without_lambdas(block_at(code, around.end()))
    return bodies


ALL = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu*"))
FILES = [name for name in ALL if name.endswith(".cu")]


@pytest.mark.parametrize("name", FILES)
def test_every_kernel_lets_the_next_one_launch_and_waits_before_it_may_return(
    name: str,
) -> None:
    for kernel, body in kernels(name).items():
        wait = re.search("|".join(rf"\b{word}\b" for word in CALLS), body)
        assert wait, f"{kernel} never waits"
        assert not re.search(r"\breturn\b", body[: wait.start()]), f"{kernel} may leave too early"


@pytest.mark.parametrize("name", FILES)
def test_every_entry_point_is_such_a_kernel(name: str) -> None:
    code, launching = code_of(name), kernels(name)
    assert code.count(ENTRY) > 0
    for found in re.finditer(re.escape(ENTRY), code):
        start = code.index("{", found.end())
        body = block_at(code, start + 1)
        calls = set(re.findall(r"(\w+)\s*[<(]", body))
        launches = calls & {"pdl_launch", "pdl_wait_then_launch", *launching}
        assert launches, code[found.start() : start]


@pytest.mark.parametrize(("function", "name"), WAITING.items())
def test_the_functions_that_wait_for_their_kernel_do(function: str, name: str) -> None:
    code = code_of(name)
    start = re.search(rf"\bvoid {function}\([^{{]*\{{", code)
    assert start
    body = without_lambdas(block_at(code, start.end()))
    wait = re.search(r"pdl_wait\w*\(\);", body)
    assert wait
    assert "return" not in body[: wait.start()]


@pytest.mark.parametrize("name", ALL)
def test_no_kernel_allocates_or_adds_floats_atomically(name: str) -> None:
    found = re.findall(r"\batomic\w*\([^,]*|\bmalloc\b|\bnew\b|(?<!cta\.)\bred\.", code_of(name))
    # barrier.cta.red is a vote. The bins of the sampler are integers: exact in any order. The
    # counts of the experts say who is done.
    bins = {
        "hopper/experts_work.cuh": ["atomicAdd(progress", "atomicAdd(done"],
        "sampling.cu": ["atomicAdd(&lo[bin]", "atomicAdd(&hi[bin]"],
        "hopper/sampling.cu": [f"atomicAdd(&words[{word}][bin]" for word in range(3)],
    }
    assert found == bins.get(name, [])


def test_every_folder_of_sources_says_for_which_architectures_it_is() -> None:
    folders = {name.rpartition("/")[0] for name in ALL} - {""}
    assert folders <= ARCH_FOLDERS.keys()


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [
        ("common.cuh", "kPageSize", geometry.PAGE_SIZE),
        ("common.cuh", "kLatentDim", geometry.LATENT_DIM),
        ("common.cuh", "kRopeDim", geometry.ROPE_DIM),
        ("splits.cuh", "kMaxSplits", geometry.MAX_SPLITS),
        ("hopper/moe_groups.cuh", "kMaxWidth", FEW_ROWS),
        ("hopper/experts_table.cuh", "kFewRows", resident.MAX_ROWS),
        ("hopper/experts_ring.cuh", "kMaxNormed", resident.MAX_NORMED),
        ("hopper/experts_ring.cuh", "kMaxNormedRows", resident.MAX_NORMED_ROWS),
        ("hopper/experts_ring.cuh", "kMaxStages", resident.MAX_STAGES),
        ("route.cuh", "kMaxExperts", MAX_EXPERTS),
        ("route.cu", "kMaxTopK", MAX_TOP_K),
        ("route.cu", "kMaxMoeRows", MAX_MOE_ROWS),
        ("splits.cuh", "kMaxStepRows", MAX_CALL_ROWS),
        ("hopper/expand_row.cu", "kSmemBytes", ROW_SMEM),
        ("work_plan.cuh", "kMinChains", head_tiles.MIN_CHAINS),
        ("work_plan.cuh", "kShortChainPages", head_tiles.SHORT_CHAIN_PAGES),
        ("work_plan.cuh", "kAnyHeads", head_tiles.ANY_HEADS),
        ("work_plan.cuh", "kAnyTile", max(head_tiles.ANY_TILES)),
        ("limits.cuh", "kLimitHeader", limits.HEADER_WORDS),
        ("limits.cuh", "kMaxBias", limits.MAX_BIAS),
        ("scores.cu", "kMaxTop", scores.MAX_TOP),
        ("scores.cu", "kChunk", scores.CHUNK),
        ("scores.cu", "kMaxChunks", scores.MAX_CHUNKS),
    ],
)
def test_kernels_and_python_agree_on_the_numbers(name: str, constant: str, value: int) -> None:
    assert re.findall(rf"\bconstexpr int {constant} = (\d+);", code_of(name)) == [str(value)]
