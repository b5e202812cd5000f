"""The client for Node.js, against daemons on this machine; skipped where node or its packages are
not to be had."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import protocol_files
from latentd import demo
from latentd.commands.child import Child
from latentd_client import Client
from lives import continued
from serving import serving

EXAMPLE = Path(__file__).parents[2] / "client/examples/node"
INSTALL = ("npm", "ci", "--ignore-scripts", "--no-audit", "--prefer-offline", "--fetch-retries=0")
INSTALL_S = 25
PROMPT = list(b"In the beginning ")
SAMPLED = 1 + 5 + 1 + 40
"""Tokens that the example samples: with the prompt, by steps, with logits, by a stream."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages; or the reason to skip."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    try:
        done = subprocess.run(
            INSTALL, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm ci did not install the packages within {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"npm ci cannot install the packages: {done.stderr[-300:]}")
    return folder


def node(folder: Path, *arguments: str, **environ: str) -> str:
    """What a script prints that ends well."""
    done = subprocess.run(
        ["node", *arguments],
        cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    assert done.returncode == 0
    return done.stdout


def read_example(printed: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)


def test_its_codec_reads_and_writes_the_published_messages(folder: Path) -> None:
    printed = node(folder, "vectors.js", str(protocol_files.VECTORS))
    assert printed == "48 messages, 43 of them written byte for byte\n"


def test_it_decodes_what_the_python_client_decodes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("torch")
    flags = ("--model", str(demo.model_dir()), "--device", "cpu", "--max-slots", "2")
    with Child(tmp_path_factory.mktemp("d"), (*flags, "--max-ctx", "128")) as child:
        child.wait_ready(120, lambda status: None)
        printed = read_example(node(folder, "example.js", LATENTD_ENDPOINT=child.endpoint))
        with Client(child.endpoint) as client, client.open(PROMPT) as slot:
            first = [slot.token or 0]
            tokens = first + [step.token for step in slot.stream(SAMPLED - 1)]
    assert json.loads(printed["text"]) == bytes(tokens).decode(errors="replace")
    length = len(PROMPT) + SAMPLED - 1
    assert printed["length"] == f"{length}, the stream's end: max_steps"
    assert printed["refused"] == f"position_conflict, the length is {length}"


def test_it_loses_and_repeats_nothing_when_a_third_of_all_replies_is_lost(
    folder: Path, endpoint: str
) -> None:
    with serving(endpoint), losing(endpoint) as (front, counts):
        printed = read_example(
            node(folder, "example.js", LATENTD_ENDPOINT=front, PATIENCE_MS="300", TRIES="15")
        )
    assert counts["lost"] > 5
    expected = bytes(continued(PROMPT, SAMPLED)).decode(errors="replace")
    assert json.loads(printed["text"]) == expected
    assert printed["length"].startswith(f"{len(PROMPT) + SAMPLED - 1}, ")


@contextlib.contextmanager
def losing(endpoint: str) -> Iterator[tuple[str, dict[str, int]]]:
    """An endpoint in front of another one, for one client, on whose way back a third of all
    messages is lost, at random, as every third could be the first frame of each of a client's
    attempts; and how many were."""
    chance = random.Random(1)
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (front, back):
        socket.setsockopt(zmq.LINGER, 0)
    name = endpoint.replace(".sock", ".front")
    front.bind(name)
    back.connect(endpoint)
    counts = {"lost": 0}
    is_over = threading.Event()

    def forward() -> None:
        client = b""
        while not is_over.is_set():
            for socket in zmq.select([front, back], [], [], 0.05)[0]:
                frames = socket.recv_multipart()
                if socket is front:
                    client, *request = frames
                    back.send_multipart(request)
                elif chance.random() < 1 / 3:
                    counts["lost"] += 1
                else:
                    front.send_multipart([client, *frames])

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield name, counts
    finally:
        is_over.set()
        thread.join()
        front.close()
        back.close()
        context.term()


LEFT_EARLY = """
import { Client } from "./client.js";
const client = await Client.connect(process.env.LATENTD_ENDPOINT, { tries: 1 });
const slot = await client.open([1, 2, 3], { sampling: { temperature: 1, seed: 2n ** 64n - 1n } });
let read = 0;
for await (const token of slot.stream({ max_steps: 1000, credit: 4 })) if (++read === 10) break;
const { end } = slot;
const { token } = await slot.step();
console.log(JSON.stringify({ read, end, token, length: slot.contextLen }));
await client.close();
"""


def test_a_stream_that_is_left_early_ends_and_the_slot_goes_on_with_a_seed_of_64_bits(
    folder: Path, endpoint: str
) -> None:
    with serving(endpoint):
        script = ("--input-type=module", "--eval", LEFT_EARLY)
        printed: dict[str, Any] = json.loads(node(folder, *script, LATENTD_ENDPOINT=endpoint))
    assert (printed["read"], printed["end"]) == (10, "cancelled")
    assert 14 <= printed["length"] <= 14 + 2 * 4
    sampled = continued([1, 2, 3], printed["length"] - 3 + 1, seed=(1 << 64) - 1)
    assert printed["token"] == sampled[-1]
