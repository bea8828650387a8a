"""Build the object a configuration node names by ``_target_``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from entrain_bench.errors import UserError


def instantiate(node: Mapping[str, Any], where: str, **arguments: Any) -> Any:
    """The object of ``node``, whose keys besides ``_target_`` and ``label`` are constructor arguments.

    Raises:
        UserError: for a missing or unknown target, unknown arguments, and whatever the constructor rejects.
    """
    if "_target_" not in node:
        raise UserError(f"{where}._target_: missing; it names the class to build")
    try:
        # Hydra would copy the arguments into a configuration; a partial takes them as they are.
        plain = {key: value for key, value in node.items() if key != "label"}
        return hydra.utils.instantiate(plain, _convert_="all", _partial_=True)(**arguments)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"{where}: cannot build {node['_target_']}: {error}") from error
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            innermost, cause = cause, cause.__cause__
        lines = str(innermost).splitlines() or [type(innermost).__name__]
        raise UserError(f"{where}: cannot build {node['_target_']}: {lines[0]}") from error
