"""``adapter=FILE``: the adapter_config.json of Hugging Face PEFT as keys of a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.adapters import EVERY

ADAPTER = "adapter"
FILE = "adapter_config.json"
# Fields that must be absent, empty or false: each changes which products have adapters, or their sizes.
UNSUPPORTED = (
    *(
        "alpha_pattern",
        "exclude_modules",
        "layer_replication",
        "layers_pattern",
        "layers_to_transform",
        "megatron_config",
    ),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora"),
)


def with_adapter(overrides: Sequence[str]) -> tuple[str, ...]:
    """Replace ``adapter=FILE`` by ``adapter.rank``, ``adapter.targets`` and ``freeze=[all]``, as PEFT freezes all else.

    ``UserError`` names the field of a file that cannot be priced.
    """
    replaced: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != ADAPTER:
            replaced.append(text)
            continue
        if other := next((one for one in overrides if one.startswith(("adapter.", "freeze="))), None):
            raise UserError(f"{text}: states adapter.* and freeze. Leave {other} out")
        try:
            rank, targets = _fields(_read(Path(value.strip("'\"")).expanduser()))
        except UserError as error:
            raise UserError(f"{text}: {error}") from error
        replaced += [f"adapter.rank={rank}", f"adapter.targets=[{','.join(targets)}]", "freeze=[all]"]
    return tuple(replaced)


def _read(place: Path) -> Mapping[str, Any]:
    path = place / FILE if place.is_dir() else place
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"must be PEFT's {FILE} or its folder ({type(error).__name__})") from error
    if not isinstance(values, Mapping):
        raise UserError(f"must be PEFT's {FILE}, a mapping")
    return values


def _fields(values: Mapping[str, Any]) -> tuple[int, list[str]]:
    kind = values.get("peft_type")
    require(kind == "LORA", "peft_type", kind, "LORA")
    bias = values.get("bias", "none")
    require(bias == "none", "bias", bias, "none")
    for name in UNSUPPORTED:
        require(not values.get(name), name, values.get(name), "absent, empty or false: it is not supported")
    rank = values.get("r")
    require(isinstance(rank, int) and not isinstance(rank, bool) and rank > 0, "r", rank, "a whole number from 1")
    assert isinstance(rank, int)
    targets = values.get("target_modules")
    if targets == EVERY:
        return rank, [EVERY]
    fits = isinstance(targets, list) and bool(targets) and all(isinstance(one, str) for one in targets)
    allowed = f"a list of names or {EVERY}. For a regular expression, state adapter.rank and adapter.targets"
    require(fits, "target_modules", targets, allowed)
    # Names with a path are of the language model, whose products have the last part as their name.
    return rank, sorted({str(one).rpartition(".")[2] for one in targets or ()})
