"""The pool as PyTorch's memory viewer reads it: segments, and in each its blocks in address order without gaps.

One mapped range is one segment.  A block's state is `active_allocated`, `active_pending_free` (freed, not yet
safe) or `inactive`.  Next: pool.py.
"""

from __future__ import annotations

from typing import Any, Final

from allocator.blocks import IDLE, LIVE, RETIRED, SMALL, Block, Heap

STATES: Final = {LIVE: "active_allocated", RETIRED: "active_pending_free", IDLE: "inactive"}


def snapshot(heap: Heap, device: int) -> dict[str, Any]:
    """`{"segments": [...], "device_traces": [...]}`.  Under the pool's lock, with the bins emptied.  O(blocks)."""
    segments = []
    for start in sorted(heap.heads):
        blocks: list[dict[str, Any]] = []
        block: Block | None = heap.heads[start]
        totals = dict.fromkeys(STATES, 0)
        first = block
        while block is not None:
            totals[block.state] += block.size
            blocks.append(
                {
                    "address": block.ptr,
                    "size": block.size,
                    "requested_size": block.requested if block.state == LIVE else 0,
                    "state": STATES[block.state],
                    "stream": block.owner.number if block.owner is not None else 0,
                    "frames": [],
                }
            )
            block = block.next
        assert first is not None
        segments.append(
            {
                "device": device,
                "address": start,
                "total_size": sum(totals.values()),
                "allocated_size": totals[LIVE],
                "active_size": totals[LIVE] + totals[RETIRED],
                "requested_size": sum(b["requested_size"] for b in blocks),
                "stream": blocks[0]["stream"],
                "segment_type": "small" if first.kind == SMALL else "large",
                "is_expandable": heap.joined,
                "frames": [],
                "blocks": blocks,
            }
        )
    return {"segments": segments, "device_traces": [[] for _ in range(device + 1)]}
