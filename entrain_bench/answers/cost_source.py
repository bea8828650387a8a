"""Where the costs that a run was charged come from, in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entrain_bench.costs.profiled.cluster import ProfiledDevice

PROFILED, FITTED, DERIVED = "profiled", "fitted", "derived"
# Of runs that have lost their records.
UNKNOWN = "not recorded"


def cost_source(cluster: Mapping[str, Any]) -> str:
    """What a cluster's configuration stands on.

    Returns:
        ``profiled`` if its layers were timed on a device; ``fitted`` if any of its constants is fitted to published
        times, as the last word of its source says (docs/constants.md); else ``derived``.
    """
    if ProfiledDevice.of(cluster):
        return PROFILED
    provenance = {str(source).rpartition(";")[2].strip() for source in cluster["sources"].values()}
    return FITTED if FITTED in provenance else DERIVED
