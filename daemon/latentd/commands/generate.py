"""`latentd generate`: a prompt through a running daemon, its continuation to stdout as it comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.commands.connecting import (
    add_connection,
    add_sampling,
    sampling_of,
    token_ids,
)
from latentd.commands.parsing import EXIT_USAGE, Parser, add_command
from latentd_client import Client
from latentd_client.arguments import whole
from latentd_client.text import BYTE_VOCABS, TextReader, load_codec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from latentd_client import DaemonInfo, Sampling
    from latentd_client.arguments import whole
from latentd_client.text import Codec


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "generate", "continue text or token ids through a running daemon", run
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="TEXT",
        help="prompt; - reads it from stdin. Models that are not byte-level (as the demo is) need "
        "--tokenizer",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="the model's tokenizer.json, or its folder (pip install '.[text]')",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=token_ids, metavar="IDS", help="prompt as token ids: 1,2,3 (any model)"
    )
    parser.add_argument(
        "--max-steps", type=whole, default=256, metavar="N",
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
        codec = codec_of(client.info, args.tokenizer)
        if args.tokens is not None:
            prompt = args.tokens
        elif codec is not None:
            prompt = codec.encode(_text(args.prompt))
        else:
            print(
                f"{args.parser.prog}: {client.info.model} has {client.info.vocab_size} tokens, "
                "not bytes: give its --tokenizer, or the prompt as --tokens",
                file=sys.stderr,
            )
            return EXIT_USAGE
        if not prompt:
            args.parser.error("the prompt is empty: there is nothing to continue")
        tokens = continuation(
            client, prompt, args.max_steps, stop_tokens(client.info, args.stop), sampling_of(args),
            "ngram" if args.draft else None,
        )  # fmt: skip
        if codec is not None and not args.ids:
            print_text(tokens, codec, prompt)
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


def codec_of(info: DaemonInfo, path: Path | None) -> Codec | None:
    """What makes text of tokens; None for a model without bytes. Raises TextError."""
    if path is None and info.vocab_size not in BYTE_VOCABS:
        return None
    return load_codec(info, path)


def print_text(tokens: Iterator[int], codec: Codec, prompt: Sequence[int]) -> None:
    """Print tokens behind a prompt as text as they come; special tokens are left out."""
    reader = TextReader(codec, context=prompt)
    for token in tokens:
        print(reader.push(token), end="", flush=True)
    print(reader.finish(), end="", flush=True)


def _text(argument: str) -> str:
    return os.fsdecode(sys.stdin.buffer.read()) if argument == "-" else argument
