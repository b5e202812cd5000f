"""Codecs, which make tokens of text and text of tokens: a checkpoint's own, with the package
`tokenizers` (`pip install '.[text]'`), or bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from latentd_client.errors import TextError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from latentd_client._detokenizing import Codec
    from latentd_client.results import DaemonInfo

BYTE_VOCABS: Final = range(256, 512)
"""Sizes of the vocabulary of a byte-level model: 256 bytes, and perhaps some special tokens."""
FILE: Final = "tokenizer.json"
MAX_BYTES: Final = 256 << 20
"""Largest file that is read as a tokenizer."""


class ByteCodec:
    """A token for each byte of UTF-8, as the bundled demo model has them. Special tokens beyond the
    bytes are no text."""

    def __init__(self, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """See Codec."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """See Codec."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class JsonCodec:
    """The tokenizer of a checkpoint, from its tokenizer.json. `encode` adds what a prompt of the
    model begins with, if its tokenizer says so; `decode` leaves special tokens out."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path` is that of a tokenizer.json or of its folder, on this machine. Raises TextError:
        the package is missing, or the file cannot be read."""
        self.path = _file(path)
        data = _read(self.path)
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._tokenizer = _parse(self.path, data)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(True).values(), default=-1)

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """See Codec; without `begins` nothing is added, for text in which a prompt's special tokens
        are written out. Raises TextError for text that is none (half a surrogate)."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=begins).ids
        except (UnicodeError, TypeError) as error:
            raise TextError(f"{text!r:.60} cannot be encoded: {error}") from None
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See Codec."""
        text: str = self._tokenizer.decode(list(tokens))
        return text


def load_codec(info: DaemonInfo, path: str | os.PathLike[str] | None = None) -> Codec:
    """The codec of the model that a daemon serves: that of `path`, a tokenizer.json or the folder
    of one on this machine (a checkpoint, for example), or without it bytes for a byte-level model
    such as the demo. Raises TextError, also when it is not the file that lies with the checkpoint
    on the daemon's side (to use another one all the same, make a JsonCodec of it)."""
    if path is not None:
        codec = JsonCodec(path)
        if info.tokenizer not in ("", codec.sha256):
            raise TextError(
                f"{codec.path} is not the {FILE} of {info.model!r}'s checkpoint: its sha256 is "
                f"{codec.sha256:.12}..., not {info.tokenizer:.12}..."
            )
        return codec_for(info, codec)
    if info.vocab_size not in BYTE_VOCABS:
        raise TextError(
            f"{info.model!r} has {info.vocab_size} tokens, not bytes: give the path of its {FILE}"
        )
    return ByteCodec(info.vocab_size)


def codec_for(info: DaemonInfo, codec: Codec | None) -> Codec:
    """A codec that a caller gives, or bytes. Raises TextError when it does not fit."""
    if codec is None:
        return load_codec(info)
    if codec.vocab_size > info.vocab_size:
        raise TextError(
            f"the tokenizer has ids up to {codec.vocab_size - 1}, {info.model!r} has "
            f"{info.vocab_size} tokens: it is another model's"
        )
    return codec


def _file(path: str | os.PathLike[str]) -> Path:
    given = Path(path)
    return given / FILE if given.is_dir() else given


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TextError(
            f"cannot read {path}: {error.strerror}; name the model's tokenizer.json or its folder, "
            "or none for a byte-level model"
        ) from None
    if len(data) > MAX_BYTES:
        raise TextError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no tokenizer is")
    return data


def _parse(path: Path, data: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TextError(
            f"{FILE} takes the package tokenizers: pip install '.[text]' from a checkout, or with "
            f"the path of a wheel in place of the dot ({error})"
        ) from None
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises no narrower one
        raise TextError(f"{path} is no {FILE}: {error}") from None
