"""What is said about a place for the sockets that is not good."""

import logging
import socket
from pathlib import Path

import pytest

from fakes import FakeEngine
from latentd.endpoint import EndpointError
from latentd.options import ServerOptions
from latentd.server import Server
from latentd_client import Client, protocol
from serving import serving


@pytest.mark.parametrize(
    ("path", "what"),
    [("/proc/self/d.sock", "cannot lock"), ("/proc/latentd/d.sock", "socket directory")],
)
def test_a_place_without_rights_is_refused_with_the_way_out(path: str, what: str) -> None:
    with pytest.raises(EndpointError, match=f"{what}.*--endpoint or LATENTD_ENDPOINT"):
        Server(FakeEngine(), ServerOptions(endpoint=f"ipc://{path}")).bind()


def test_a_directory_for_the_sockets_is_made_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "latentd"
    with caplog.at_level(logging.INFO), serving(f"ipc://{folder}/d.sock"):
        assert folder.stat().st_mode & 0o777 == 0o750
    made = [text for text in caplog.messages if "made" in text]
    assert made == [f"made socket directory {folder}"]


def test_a_path_that_is_not_there_is_refused_and_left_so(tmp_path: Path) -> None:
    folder = tmp_path / "slip" / "latentd"
    with pytest.raises(EndpointError, match=f"{folder}: {folder.parent} does not exist; make it"):
        Server(FakeEngine(), ServerOptions(endpoint=f"ipc://{folder}/d.sock")).bind()
    assert not folder.parent.exists()


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EndpointError, match="file: is a file"):
        Server(FakeEngine(), ServerOptions(endpoint=f"ipc://{tmp_path}/file/d.sock")).bind()


def test_an_open_directory_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.WARNING), serving(f"ipc://{tmp_path}/d.sock"):
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            f"socket directory {tmp_path} has mode 0755"
        ]


def test_where_the_port_beside_one_that_the_system_has_chosen_is_taken_another_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(
            protocol, "control_endpoint",
            lambda where: f"tcp://127.0.0.1:{'*' if where.endswith('*') else port}",
        )  # fmt: skip
        with serving("tcp://127.0.0.1:*") as running:
            assert int(running.server.control_endpoint.rpartition(":")[2]) != port
            with Client(running.endpoint) as client:
                assert client.health()["state"] == "ready"
