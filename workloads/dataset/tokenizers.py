"""Texts to tokens by a tokenizer's file and its chat template, or by bytes."""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

from .fields import RawSample
from .source import BadSampleError, Reason, one_line

# A tokenizer: every UTF-8 byte is a token, as for byte-level models (ByT5, arXiv:2105.13626).
BYTES = "bytes"


# Names of roles in data, as chat templates name them.
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool"}


def tokenizer_version(tokenizer: str | None) -> str:
    """Return ``bytes``, a hash of file and template, or nothing for none; ``UserError`` for a file of another kind."""
    if tokenizer is None or tokenizer == BYTES:
        return tokenizer or ""
    template = _tokenizer(tokenizer).chat_template
    content = Path(tokenizer).expanduser().read_bytes()
    return hashlib.sha256(content + (json.dumps(template) if template else "").encode()).hexdigest()


def token_ids(sample: RawSample, tokenizer: str) -> IntArray:
    """Return the tokens of a sample's texts ``[tokens]``, int64; of turns as the chat template writes them, if any.

    Texts that are no turns are tokenized one by one, without special tokens. ``BadSampleError`` for turns that the
    template refuses.
    """
    if tokenizer == BYTES:
        content = b"".join(piece.encode(errors="surrogatepass") for piece in sample.texts)
        return np.frombuffer(content, np.uint8).astype(np.int64)
    pieces = sample.texts
    known = _tokenizer(tokenizer)
    if sample.turns and known.chat_template:
        starts = [start for _, start in sample.turns]
        messages = [
            {"role": _ROLES.get(role, role), "content": "".join(sample.texts[start:stop])}
            for (role, start), stop in zip(sample.turns, [*starts[1:], None], strict=True)
        ]
        try:
            pieces = [*sample.texts[: starts[0]], known.apply_chat_template(messages, tokenize=False)]
        # Templates may raise anything.
        except Exception as error:
            raise BadSampleError(Reason.RECORD, f"the chat template refuses its turns: {one_line(error)}") from error
    # The library takes no halves of surrogate pairs.
    valid = [piece.encode(errors="replace").decode() for piece in pieces]
    encoded = known.backend_tokenizer.encode_batch_fast(valid, add_special_tokens=False)
    return np.array([token for piece in encoded for token in piece.ids], np.int64)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    """Return a tokenizer with the chat template next to its file, if any; ``UserError`` for a file of another kind."""
    # The library reads this when it is imported; scans use all cores already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Slow to import.
    from transformers import PreTrainedTokenizerFast

    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"tokenizer={name}: does not exist. Must be the path of a tokenizer.json, {BYTES} or null")
    others = (path.with_name(each) for each in ("chat_template.jinja", "tokenizer_config.json"))
    try:
        if path.name == "tokenizer.json" and any(file.is_file() for file in others):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    # The library has no exception of its own.
    except Exception as error:
        raise UserError(f"tokenizer={name}: no tokenizer.json ({one_line(error)})") from error
    # Both are settings for batches of tensors.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
