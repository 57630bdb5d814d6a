"""The policy: the only place where blocks and streams meet."""

from __future__ import annotations

from allocator.caching.pool import CachingAllocator, CallbackHandle

__all__ = ["CachingAllocator", "CallbackHandle"]
