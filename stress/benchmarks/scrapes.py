"""What scrapes over HTTP cost a thread that allocates: its throughput, its longest pause, threads and memory.

The allocating thread takes and drops an exact size in a loop, on the hot path, where anything that takes the
interpreter or the pool's lock from it shows most.  The clients live in another process, on connections that stay open.
Windows with and without scrapes alternate, and the ratio of each window to the ones beside it counts.  The pause is the
longest time between two turns of the loop; the same figure without scrapes says how much of it is the machine.  `taken`
is the processor time of all other threads of the process, as a share of the window, beyond that without scrapes: what
serving takes of the interpreter, whatever else the machine does.

`many` is a pool with 100,000 blocks on 200 streams, figures by stream included.
"""

from __future__ import annotations

import gc
import gzip
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest

from allocator import CachingAllocator, Config, SimDevice, Stream
from allocator.metrics import AllocatorCollector, serve

SIZE: Final = 4096
WINDOW_S: Final = 1.0
ROUNDS: Final = 15
CLIENTS: Final = 10
BLOCKS: Final = 100_000
STREAMS: Final = 200
WARM_S: Final = 0.3

_CLIENT: Final = r"""
import socket, sys, threading, time
port = int(sys.argv[1])
request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n"
go, took, lock = threading.Event(), [], threading.Lock()
interval = 0.0
def scrape(client):
    client.sendall(request)
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    length = int([line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")][0].split(b":")[1])
    while len(body) < length:
        body += client.recv(65536)
def run():
    client = socket.create_connection(("127.0.0.1", port))
    while True:
        go.wait()
        began = time.perf_counter()
        scrape(client)
        ended = time.perf_counter()
        with lock:
            took.append(ended - began)
        if interval:
            time.sleep(max(0.0, interval - (ended - began)))
threads = []
for line in sys.stdin:
    count, interval = int(line.split()[0]), float(line.split()[1])
    if count:
        while len(threads) < count:
            threads.append(threading.Thread(target=run, daemon=True))
            threads[-1].start()
        with lock:
            took.clear()
        go.set()
    else:
        go.clear()
    with lock:
        print(len(took), sum(took), max(took, default=0.0), flush=True)
"""


@dataclass(frozen=True)
class Window:
    """One window of the allocating thread: turns a second, the longest in ms, and the other threads' share of it."""

    rate: float
    worst_ms: float
    others: float


class Clients:
    """The process that scrapes."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, count: int, interval_s: float = 0.0) -> tuple[int, float, float]:
        """Scrape with so many clients, 0: stop; (scrapes, mean seconds, longest) of the time before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count} {interval_s}\n")
        self._process.stdin.flush()
        scrapes, seconds, longest = self._process.stdout.readline().split()
        return int(scrapes), float(seconds) / max(int(scrapes), 1), float(longest)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def spin(pool: CachingAllocator, stream: Stream, seconds: float) -> Window:
    """Allocate and drop for so long."""
    clock = time.perf_counter
    allocate = pool.allocate
    turns = 0
    longest = 0.0
    others = time.process_time() - time.thread_time()
    began = before = clock()
    end = began + seconds
    while before < end:
        allocate(SIZE, stream)
        now = clock()
        if now - before > longest:
            longest = now - before
        before = now
        turns += 1
    others = time.process_time() - time.thread_time() - others
    return Window(turns / (before - began), 1e3 * longest, others / (before - began))


@contextmanager
def pool_of(blocks: int, streams: int) -> Iterator[tuple[CachingAllocator, Stream]]:
    """A pool with that many blocks on that many streams, and the stream to allocate on."""
    gpu = SimDevice(memory=1 << 42)
    with CachingAllocator(gpu, Config(), name="bench") as pool:
        pool.announce = None  # the oracle is the simulator's, not the allocator's
        every = [Stream(gpu, name=f"s{number}") for number in range(streams)]
        kept = [pool.allocate(512 * (1 + number % 64), every[number % streams]) for number in range(blocks)]
        gc.collect()
        gc.freeze()  # these blocks are the benchmark's own: a program's objects are not walked for its pool's sake
        yield pool, every[0]
        gc.unfreeze()
        kept.clear()


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(
    blocks: int, streams: int, clients: int, interval_s: float, rounds: int = ROUNDS, window_s: float = WINDOW_S
) -> dict[str, Any]:
    """Alternating windows; the ratio is of a window with scrapes to the mean of those before and after."""
    with pool_of(blocks, streams) as (pool, stream), serve(pool, port=0) as server:
        callers = Clients(server.port)
        try:
            callers.tell(clients)
            spin(pool, stream, WARM_S)
            callers.tell(0)
            threads, memory = threading.active_count(), _rss()
            alone = [spin(pool, stream, window_s)]
            scraped: list[Window] = []
            scrapes = 0
            seconds: list[float] = []
            longest = 0.0
            for _ in range(rounds):
                callers.tell(clients, interval_s)
                scraped.append(spin(pool, stream, window_s))
                count, mean, worst = callers.tell(0)
                scrapes += count
                seconds.append(mean)
                longest = max(longest, worst)
                spin(pool, stream, WARM_S)  # what was under way ends
                alone.append(spin(pool, stream, window_s))
            ratios = [
                2 * window.rate / (before.rate + after.rate)
                for before, window, after in zip(alone, scraped, alone[1:], strict=False)
            ]
            return {
                "ratio": statistics.median(ratios),
                "low": statistics.quantiles(ratios, n=4)[0],
                "high": statistics.quantiles(ratios, n=4)[2],
                "taken": statistics.fmean(w.others for w in scraped) - statistics.fmean(w.others for w in alone),
                "scrapes_per_second": scrapes / (rounds * window_s),
                "scrape_ms": 1e3 * statistics.median(seconds),
                "longest_scrape_ms": 1e3 * longest,
                "worst_pause_ms": max(window.worst_ms for window in scraped),
                "worst_pause_alone_ms": max(window.worst_ms for window in alone),
                "median_worst_pause_ms": statistics.median(window.worst_ms for window in scraped),
                "threads_added": threading.active_count() - threads,
                "rss_added_bytes": _rss() - memory,
                "windows": [asdict(window) for window in scraped],
                "windows_alone": [asdict(window) for window in alone],
            }
        finally:
            callers.close()


def reading(blocks: int, streams: int, rounds: int = 21) -> float:
    """Milliseconds of the thread for one scrape's reading, writing and packing."""
    registry = CollectorRegistry()
    with pool_of(blocks, streams) as (pool, _):
        registry.register(AllocatorCollector(pool, per_stream=True))
        times = []
        for _ in range(rounds):
            time.sleep(0.1)  # the collector spaces its scrapes
            began = time.thread_time()
            gzip.compress(generate_latest(registry), 5)
            times.append(time.thread_time() - began)
    return 1e3 * statistics.median(times)


def main(
    rounds: int = ROUNDS, window_s: float = WINDOW_S, blocks: int = BLOCKS, streams: int = STREAMS
) -> tuple[str, dict[str, Any]]:
    """Text for people, and the figures."""
    figures: dict[str, Any] = {
        "one a second": measure(1000, 8, 1, 1.0, rounds, window_s),
        "10 clients": measure(1000, 8, CLIENTS, 0.0, rounds, window_s),
        "10 clients, many": measure(blocks, streams, CLIENTS, 0.0, rounds, window_s),
    }
    text = ["an allocating thread under scrapes over HTTP, against itself without; windows alternate"]
    text.append(
        f"  {'':18} {'ratio':>6} {'(quartiles)':>14} {'taken':>7} {'scrapes/s':>10} {'ms each':>8} {'worst pause':>12} "
        f"{'alone':>9} {'threads':>8} {'memory':>9}"
    )
    for name, found in figures.items():
        text.append(
            f"  {name:18} {found['ratio']:6.3f} ({found['low']:.3f}..{found['high']:.3f}) {found['taken']:7.2%} "
            f"{found['scrapes_per_second']:10.1f} {found['scrape_ms']:8.1f} {found['worst_pause_ms']:9.1f} ms "
            f"{found['worst_pause_alone_ms']:6.1f} ms {found['threads_added']:+8} "
            f"{found['rss_added_bytes'] / (1 << 20):+6.1f} MiB"
        )
    figures["reading ms"] = {"1000 blocks": reading(1000, 8), "many": reading(blocks, streams)}
    text.append(
        f"  one reading, gzip included: {figures['reading ms']['1000 blocks']:.1f} ms with 1,000 blocks on 8 streams, "
        f"{figures['reading ms']['many']:.1f} ms with {blocks:,} on {streams}"
    )
    return "\n".join(text), figures
