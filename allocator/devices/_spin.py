"""A kernel that keeps its stream busy for a given time, as PTX text that the driver compiles.

Written for the oldest target that every GPU with a CUDA 12 driver understands; needs no compiler on the
machine.  %globaltimer counts nanoseconds, in steps of about 1 us or less.

Used by: CudaDevice.spin.
"""

from __future__ import annotations

import ctypes
from typing import Final

NAME: Final = b"weir_spin"

PTX: Final = b"""
.version 6.0
.target sm_52
.address_size 64

.visible .entry weir_spin(
    .param .u64 duration
)
{
    .reg .pred %short;
    .reg .b64 %start, %now, %gone, %wanted;

    ld.param.u64 %wanted, [duration];
    mov.u64 %start, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %start;
    setp.lt.u64 %short, %gone, %wanted;
    @%short bra AGAIN;
    ret;
}
\0"""


def launch(stream: int, duration_ns: int) -> tuple[object, ...]:
    """`cuLaunchKernel`'s arguments after the function: one thread, its one parameter."""
    parameters = ((max(0, int(duration_ns)),), (ctypes.c_uint64,))
    return (1, 1, 1, 1, 1, 1, 0, stream, parameters, 0)
