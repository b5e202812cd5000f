"""What is said about a place for the sockets that is not good."""

import logging
from pathlib import Path

import pytest

from fakes import FakeEngine
from latentd.endpoint import EndpointError
from latentd.server import Server, ServerOptions
from serving import serving


@pytest.mark.parametrize(
    ("path", "what"),
    [("/proc/self/d.sock", "cannot lock"), ("/proc/latentd/d.sock", "socket directory")],
)
def test_a_place_without_rights_is_refused_with_the_way_out(path: str, what: str) -> None:
    with pytest.raises(EndpointError, match=f"{what}.*--endpoint or LATENTD_ENDPOINT"):
        Server(FakeEngine(), ServerOptions(endpoint=f"ipc://{path}")).bind()


def test_an_open_directory_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.WARNING), serving(f"ipc://{tmp_path}/d.sock"):
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            f"socket directory {tmp_path} has mode 0755"
        ]
