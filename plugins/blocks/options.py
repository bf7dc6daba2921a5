"""What can be set, and asked for, in every block manager. It knows no blocks."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from turnout.core.optional import BlockStats
from turnout.plugins.blocks.eviction import POLICIES

log = logging.getLogger("turnout.blocks")


@dataclass
class Options:
    """The options of every block manager."""

    block_size: int = 16  # tokens
    num_blocks: int | None = None  # None: as many as memory allows
    prefix_cache: bool = True  # requests with the same beginning share its blocks
    eviction: str = "lru"  # lru, lfu, fifo or priority: which unused prefix gives way first
    ttl: float | None = None  # seconds after its last use that a prefix can be found; None: while there is room
    max_pinned: float = 0.5  # share of the blocks that requests labelled `pin` may keep from giving way
    host_blocks: int = 0  # blocks of host memory for prefixes that gave way

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"blocks.block_size must be at least 1, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"blocks.num_blocks must be at least 1, or null to fit memory, got {self.num_blocks}")
        if self.eviction not in POLICIES:
            raise ValueError(f"blocks.eviction must be one of {', '.join(POLICIES)}, got {self.eviction}")
        if self.ttl is not None and not self.ttl > 0:
            raise ValueError(f"blocks.ttl must be above 0, or null for no limit, got {self.ttl}")
        if not 0.0 <= self.max_pinned <= 1.0:
            raise ValueError(f"blocks.max_pinned must be between 0 and 1, got {self.max_pinned}")
        if self.host_blocks < 0:
            raise ValueError(f"blocks.host_blocks must not be negative, got {self.host_blocks}")
        if self.host_blocks and not self.prefix_cache:
            raise ValueError(f"blocks.host_blocks must be 0 without blocks.prefix_cache, got {self.host_blocks}")
        self.stats = BlockStats()


@lru_cache(256)  # so that a label that makes no sense is logged once
def pin_seconds(label: str) -> float | None:
    """What a label `pin` asks for: seconds after the last use; 0: no pin. None, and a warning, when it makes no sense."""
    if label in ("true", "1"):
        return math.inf
    if label in ("false", "0"):
        return 0.0
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)s", label):
        return float(match[1])
    log.warning("the label pin=%r pins nothing: it must be true, false, or seconds such as 300s", label)
    return None
