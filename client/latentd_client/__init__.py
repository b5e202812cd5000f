"""The client of latentd: `Client` blocks, `AsyncClient` has the same methods for asyncio."""

from latentd_client._version import __version__
from latentd_client.aio import AsyncClient
from latentd_client.aio_slot import AsyncSlot
from latentd_client.client import Client
from latentd_client.control import Control
from latentd_client.errors import (
    CODES,
    ConnectionLost,
    DeadlineExceeded,
    LatentdError,
    ProtocolError,
    RequestRejected,
)
from latentd_client.protocol import DEFAULT_ENDPOINT
from latentd_client.results import DaemonInfo, Sampling, Step
from latentd_client.slot import Slot

__all__ = [
    "CODES",
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "AsyncSlot",
    "Client",
    "ConnectionLost",
    "Control",
    "DaemonInfo",
    "DeadlineExceeded",
    "LatentdError",
    "ProtocolError",
    "RequestRejected",
    "Sampling",
    "Slot",
    "Step",
    "__version__",
]
