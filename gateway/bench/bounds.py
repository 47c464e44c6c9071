"""Numbers of a report, with the range that a file is held to when it is read again.

msgspec checks them where it decodes, and names the field. Not here: what a server may tell
(`gateway/bench/plausible.py`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]  # a time, a rate, a mean: whatever is not below 0
Number = Annotated[float, Meta(ge=-1e18, le=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
