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
    KeyFault,
    LatentdError,
    ModelChanged,
    ProtocolError,
    RequestRejected,
    SessionLost,
)
from latentd_client.keys import CurveKeys
from latentd_client.ngram import Drafter, NgramDrafter
from latentd_client.pages import PageGeometry, Pages, Piece
from latentd_client.protocol import DEFAULT_ENDPOINT
from latentd_client.results import (
    DaemonInfo,
    PromptLogprobs,
    Sampling,
    Step,
    TokenLogprob,
    Verified,
)
from latentd_client.slot import Slot

__all__ = [
    "CODES",
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "AsyncSlot",
    "Client",
    "ConnectionLost",
    "Control",
    "CurveKeys",
    "DaemonInfo",
    "DeadlineExceeded",
    "Drafter",
    "KeyFault",
    "LatentdError",
    "ModelChanged",
    "NgramDrafter",
    "PageGeometry",
    "Pages",
    "Piece",
    "PromptLogprobs",
    "ProtocolError",
    "RequestRejected",
    "Sampling",
    "SessionLost",
    "Slot",
    "Step",
    "TokenLogprob",
    "Verified",
    "__version__",
]
