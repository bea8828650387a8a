"""Texts to tokens by a tokenizer's file or by bytes."""

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

# A tokenizer: every UTF-8 byte is a token, as for byte-level models (ByT5, arXiv:2105.13626).
BYTES = "bytes"


def tokenizer_version(tokenizer: str | None) -> str:
    """Return ``bytes``, a file's hash, or nothing for none; ``UserError`` for a file that is no tokenizer."""
    if tokenizer is None or tokenizer == BYTES:
        return tokenizer or ""
    _tokenizer(tokenizer)
    return hashlib.sha256(Path(tokenizer).expanduser().read_bytes()).hexdigest()


def token_ids(pieces: Sequence[str], tokenizer: str) -> IntArray:
    """Return the tokens of pieces of text, tokenized one by one without special tokens ``[tokens]``, int64."""
    if tokenizer == BYTES:
        content = b"".join(piece.encode(errors="surrogatepass") for piece in pieces)
        return np.frombuffer(content, np.uint8).astype(np.int64)
    # The library takes no halves of surrogate pairs.
    valid = [piece.encode(errors="replace").decode() for piece in pieces]
    encoded = _tokenizer(tokenizer).encode_batch_fast(valid, add_special_tokens=False)
    return np.array([token for piece in encoded for token in piece.ids], np.int64)


def vocabulary_of(tokenizer: str) -> int:
    """Return one more than the largest id of a tokenizer."""
    return 256 if tokenizer == BYTES else 1 + max(_tokenizer(tokenizer).get_vocab(with_added_tokens=True).values())


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    # The library reads this when it is imported; scans use all cores already.
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
    # Both are settings for batches of tensors.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
