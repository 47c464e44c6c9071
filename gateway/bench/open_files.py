"""How many files this process may have open: each request in flight is a connection, and that is a file.

Not here: connections (`backend/http_client.py`).
"""

from __future__ import annotations

import resource
from typing import Final

from gateway.bench.plan import Plan

# For standard streams, libraries, name look-ups, reports, and connections that are about to close.
SPARE: Final = 64
_UNBOUNDED: Final = 1 << 20  # for an open loop without a cap: Linux's own upper bound for a process


def make_room(plan: Plan) -> None:
    """Raise the process's soft limit as far as the load needs it.

    Raises `ValueError` that names the flag, its value and the limit, where the hard limit is too low.
    """
    num = plan.max_concurrency if plan.is_open else plan.users
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _UNBOUNDED if hard == resource.RLIM_INFINITY else hard
    needed = _UNBOUNDED if num is None else num + SPARE
    if soft < needed:
        soft = _raised(min(needed, most), soft, hard)
    if num is not None and soft < needed:
        flag = "--max-concurrency" if plan.is_open else "--concurrency"
        raise ValueError(
            f"{flag} is {num}, and this process may have {soft} files open (ulimit -n), of which {SPARE} are "
            f"for other things; it must be at most {max(0, soft - SPARE)}"
        )


def _raised(wanted: int, soft: int, hard: int) -> int:
    """The soft limit after it was raised, if the system lets us."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a lower bound of its own
        return soft
    return wanted
