"""How long texts are: in tokens of a tokenizer that is a file here, or in bytes; nothing is downloaded.

Tokenizers are read by Hugging Face's tokenizers, whose ``tokenizer.json`` every recent model has. Where there is none,
a trace holds characters, and the model's own ratio makes tokens of them (``model.tokens.text_chars_per_token``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

# Every UTF-8 byte a token, as byte-level models have it (ByT5, arXiv:2105.13626).
BYTES = "bytes"


def tokenizer_version(tokenizer: str | None) -> str:
    """A tokenizer's kind or its file's hash, empty for none; ``UserError`` for a file that is no tokenizer."""
    if tokenizer is None or tokenizer == BYTES:
        return tokenizer or ""
    _load(tokenizer)
    return hashlib.sha256(Path(tokenizer).expanduser().read_bytes()).hexdigest()


def token_ids(pieces: Sequence[str], tokenizer: str) -> IntArray:
    """Tokens of a sample's pieces of text, tokenized one by one ``[tokens]``, int64: as many as are counted of it."""
    if tokenizer == BYTES:
        content = b"".join(map(_bytes_of, pieces))
        return np.frombuffer(content, np.uint8).astype(np.int64)
    found = _load(tokenizer).encode_batch_fast([*map(_valid, pieces)], add_special_tokens=False)
    return np.array([one for piece in found for one in piece.ids], np.int64)


def vocabulary_of(tokenizer: str) -> int:
    """The number above the largest id of a tokenizer."""
    return 256 if tokenizer == BYTES else 1 + max(_load(tokenizer).get_vocab(with_added_tokens=True).values())


def count_tokens(texts: Sequence[Sequence[str]], tokenizer: str) -> list[int]:
    """Tokens of the pieces of every sample, tokenized one by one, without special tokens."""
    if tokenizer == BYTES:
        return [sum(len(_bytes_of(piece)) for piece in pieces) for pieces in texts]
    flat = [_valid(piece) for pieces in texts for piece in pieces]
    lengths = iter([len(found) for found in _load(tokenizer).encode_batch_fast(flat, add_special_tokens=False)])
    return [sum(next(lengths) for _ in pieces) for pieces in texts]


def _bytes_of(piece: str) -> bytes:
    return piece.encode(errors="surrogatepass")


def _valid(piece: str) -> str:
    """A text without halves of characters, which the library does not take."""
    return piece.encode(errors="replace").decode()


@lru_cache(maxsize=1)
def _load(name: str) -> Any:
    # Scans share the cores already; and it reads this when it is imported.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"tokenizer={name}: does not exist. Must be the path of a tokenizer.json, {BYTES} or null")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library has no exception of its own.
    except Exception as error:
        raise UserError(f"tokenizer={name}: no tokenizer.json ({' '.join(str(error).split())[:120]})") from error
    # What a file says of lengths is for batches of tensors.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
