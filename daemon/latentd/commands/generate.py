"""`latentd generate`: a prompt through a running daemon, its continuation to stdout as it comes."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TYPE_CHECKING

from latentd import demo
from latentd.commands.connecting import (
    add_connection,
    add_sampling,
    positive_int,
    sampling_of,
    token_ids,
)
from latentd.commands.parsing import EXIT_USAGE, Parser, add_command
from latentd_client import Client

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from latentd_client import DaemonInfo, Sampling

BYTE_VOCABS = range(256, 512)
"""Vocabulary sizes of byte-level models: 256 bytes and perhaps some special tokens."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "generate", "continue text or token ids through a running daemon", run
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="TEXT",
        help="prompt for a byte-level model such as the demo; - reads it from stdin",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=token_ids, metavar="IDS", help="prompt as token ids: 1,2,3 (any model)"
    )
    parser.add_argument(
        "--max-steps", type=positive_int, default=256, metavar="N",
        help="most tokens to generate (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--stop", type=token_ids, metavar="IDS",
        help="token ids that end it (default: the model's end tokens)",
    )  # fmt: skip
    parser.add_argument(
        "--draft", action="store_true",
        help="guess tokens from the text so far and verify them together (the same text, in fewer "
        "steps where it repeats itself)",
    )  # fmt: skip
    parser.add_argument("--ids", action="store_true", help="print token ids, also for text models")
    add_sampling(parser)
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Stream one continuation."""
    if (args.prompt is None) == (args.tokens is None):
        args.parser.error("give either TEXT or --tokens")
    with Client(args.endpoint, timeout_s=args.timeout_s) as client:
        as_text = client.info.vocab_size in BYTE_VOCABS and not args.ids
        if args.tokens is None and client.info.vocab_size not in BYTE_VOCABS:
            print(
                f"{args.parser.prog}: {client.info.model} has {client.info.vocab_size} tokens, "
                "not bytes: give the prompt as --tokens",
                file=sys.stderr,
            )
            return EXIT_USAGE
        prompt = args.tokens if args.tokens is not None else demo.encode(_text(args.prompt))
        if not prompt:
            args.parser.error("the prompt is empty: there is nothing to continue")
        tokens = continuation(
            client, prompt, args.max_steps, stop_tokens(client.info, args.stop), sampling_of(args),
            "ngram" if args.draft else None,
        )  # fmt: skip
        if as_text:
            print_text(tokens)
        else:
            for token in tokens:
                print(token, end=" ", flush=True)
        print()
    return 0


def continuation(
    client: Client, prompt: list[int], max_steps: int, stop: list[int], sampling: Sampling,
    draft: str | None = None,
) -> Iterator[int]:  # fmt: skip
    """The tokens after `prompt`, at most `max_steps`, without the stop token that ended them."""
    with client.open(prompt, sampling=sampling) as slot:
        if slot.token is None or slot.token in stop:
            return
        yield slot.token
        room = min(max_steps - 1, client.info.max_ctx - slot.context_len)
        if room > 0:
            for step in slot.stream(max_steps=room, stop=stop, draft=draft):
                if step.token in stop:
                    return
                yield step.token


def stop_tokens(info: DaemonInfo, given: list[int] | None) -> list[int]:
    """The stop tokens asked for, else those of the model."""
    return list(info.eos_token_ids) if given is None else given


def print_text(tokens: Iterator[int]) -> None:
    """Print byte tokens as UTF-8 as they come; special tokens beyond the bytes are left out."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        print(decoder.decode(bytes([token] if token < 256 else [])), end="", flush=True)
    print(decoder.decode(b"", final=True), end="", flush=True)


def _text(argument: str) -> str:
    return os.fsdecode(sys.stdin.buffer.read()) if argument == "-" else argument
