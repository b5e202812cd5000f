"""Cubins of latent attention and of the rest of a decode step, launches, and a torch reference."""

from typing import Final

__version__: Final = "0.1.0"

ARITHMETIC_VERSION: Final = 7
"""Raised whenever the bits of any kernel change; part of the fingerprint of a daemon."""
