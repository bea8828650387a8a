"""Whether a checkpoint's metadata are data: ``torch.distributed.checkpoint`` unpickles them, which may run anything."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
# What it pickles there, and no more: a module's other names lead anywhere.
_CLASSES = frozenset(
    {
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
        *(
            (f"{_CHECKPOINT}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that a checkpoint's metadata hold")
        return super().find_class(module, name)


def check_metadata(folder: Path) -> None:
    """Raise ``pickle.UnpicklingError`` if a checkpoint's metadata hold anything but what torch writes there."""
    with (folder / METADATA).open("rb") as file:
        _DataOnly(file).load()
