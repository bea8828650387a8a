"""How ranks reach their GPU and each other: hardware queues, and the interface that they listen on.

CUDA maps streams to a GPU's queues, and what waits in one holds up all behind it. No order of actions gets stuck in any
number of queues (``messages/transfers.py``). But with one a rank sends, receives and computes one after the other, so
that ``p2p=overlapped`` would measure what it is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrain_bench.base.errors import require

# Work queues from host to device (docs.nvidia.com/deploy, CUDA MPS, topic 5.2.4). Their range, 1 to 32, is that of the
# CUDA programming guide's table of environment variables, which was not read for this.
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32
# Where ranks listen that are all on one machine, whatever interface others of the user's jobs are given.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def connections_unless_given(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable at its most, if the environment does not have it; CUDA reads it when it starts."""
    return {} if VARIABLE in environment else {VARIABLE: str(MOST_CONNECTIONS)}


def check_connections(environment: Mapping[str, str]) -> None:
    """Raise ``UserError`` for a number of queues that measures something else, or that CUDA does not have."""
    given = environment.get(VARIABLE, str(MOST_CONNECTIONS))
    fits = given.isdecimal() and 2 <= int(given) <= MOST_CONNECTIONS
    require(fits, VARIABLE, given, f"from 2 to {MOST_CONNECTIONS}; with 1, messages block computation")
