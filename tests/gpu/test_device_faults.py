"""Faults of a GPU that serves: a kernel that writes out of bounds, and memory that is not there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fault_clients import PROMPT
from fault_lab import Lab, seen_amid_work
from latentd_client import Client, Sampling
from latentd_kernels import driver
from processes import latentd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Lab]

pytestmark = pytest.mark.gpu

FLAGS = ("--device", "cuda", "--max-slots", "8", "--max-ctx", "4096", "--name", "tiny")
PAGE_BYTES = 2 * 64 * 576 * 2
"""Of the tiny model, which has two layers."""
TOLERANCE = 256 << 20
"""What the driver may keep or take for itself."""


@pytest.fixture
def model(tiny_dir: Path) -> tuple[str, ...]:
    return ("--weights", "random", "--config", str(tiny_dir))


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, model: tuple[str, ...]) -> Iterator[Start]:
    """Starts a daemon on the GPU."""
    labs: list[Lab] = []

    def start(*flags: str) -> Lab:
        labs.append(Lab(tmp_path_factory.mktemp("f"), (*model, *FLAGS, *flags)))
        return labs[-1]

    yield start
    for lab in labs:
        lab.__exit__()


def free_bytes() -> int:
    """Memory of the GPU that nobody has."""
    driver.use_device()
    torch.cuda.empty_cache()
    return driver.memory_info()[0]


def test_a_write_out_of_bounds_is_told_to_every_client_and_ends_the_daemon_within_2_s(
    start: Start,
) -> None:
    lab = start()
    seen = seen_amid_work(lab, lambda: lab.switch("out-of-bounds", "1"))
    assert set(seen.codes.values()) == {"device_fault"}
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in text for text in seen.texts.values())
    assert seen.state == "fault"
    assert seen.exit_code == 70
    assert seen.took_s < 2


def test_a_killed_daemon_leaves_the_memory_of_the_gpu_free(start: Start) -> None:
    before = free_bytes()
    pages = int(before * 0.6) // PAGE_BYTES
    lab = start("--kv-pages", str(pages))
    assert before - free_bytes() > pages * PAGE_BYTES
    lab.child.process.kill()
    assert lab.wait() == -9
    assert abs(before - free_bytes()) < TOLERANCE
    lab.start()  # there would be no room for a second one
    with Client(lab.child.endpoint) as client, client.open(PROMPT) as slot:
        assert slot.step().context_len == len(PROMPT) + 1


def test_a_pool_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    pages = 2 * free_bytes() // PAGE_BYTES
    endpoint = f"ipc://{tmp_path}/d"
    done = latentd(
        "serve", *model, *FLAGS, "--kv-pages", str(pages), "--endpoint", endpoint,
        "--log-level", "error",
    )  # fmt: skip
    assert done.returncode == 78
    assert f"kv_pages {pages} asks for {pages} pages" in done.stderr
    assert "GiB are left for them" in done.stderr
    assert done.stderr.count("\n") == 1


def everything(client: Client) -> list[Any]:
    """What a client can ask for, and what came of it."""
    hot = Sampling(temperature=1.0, top_p=0.9, seed=5)
    with client.open(list(range(256)) * 12, sampling=hot) as slot, client.open(PROMPT) as other:
        mask = np.arange(256) % 3 == 0
        seen: list[Any] = [slot.token, other.token]
        seen += [(step.token, step.logprob) for step in slot.stream(70)]
        seen += [(step.token, step.logprob) for step in other.stream(30, mask=mask)]
        step = slot.step(logits=True)
        assert step.logits is not None
        seen += [step.token, step.logits.tobytes()]
        with slot.fork(sampling=hot) as fork:
            seen += [step.token for step in fork.stream(70)]
            with client.adopt(fork.export()) as adopted:
                seen += [step.token for step in adopted.stream(70)]
        slot.truncate(1000)
        return [*seen, slot.step(token=7).token]


def test_memory_that_others_take_changes_nothing_for_who_is_served(start: Start) -> None:
    """All that a step needs is there before READY, for whatever is asked for the first time."""
    quiet = start()
    with Client(quiet.child.endpoint) as client:
        expected = everything(client)
    quiet.child.stop()
    lab = start()
    taken = []
    size = 1 << 36
    while size >= 1 << 20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size >>= 1
    assert driver.memory_info()[0] < 64 << 20
    found: list[Any] = []
    with Client(lab.child.endpoint) as client, Client(lab.child.endpoint) as second:
        beside = threading.Thread(target=lambda: found.append(everything(second)))
        beside.start()
        assert everything(client) == expected
        beside.join()
    assert found == [expected]
    taken.clear()
    torch.cuda.empty_cache()
