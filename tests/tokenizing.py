"""Small tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

from typing import Any

TEXT = "The quick brown fox – naïve, 狐狸 and 😀 – jumps over the lazy dog. " * 3  # noqa: RUF001


def byte_level() -> Any:
    """As DeepSeek's: merges of bytes, a token at the beginning of each prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 0)])
    return tokenizer


def byte_fallback() -> Any:
    """As Llama's: words that carry their space, and bytes for what is in no word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["▁The", "▁quick", "▁fox", "▁", "é", "T", "h", "e", ".", "o", "x", "▁a", "a"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return tokenizer


def words(count: int) -> Any:
    """A word for each id: w0, w1 and so on."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, "w0"))
