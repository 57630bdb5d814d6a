"""Switching over and back: nothing of the program's is lost on the way, in whatever order it is done."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import cupy
import pytest

import allocator
from allocator import CachingAllocator, Config, SimDevice
from allocator.errors import AllocatorError
from allocator.integrations.cupy import library as real
from allocator.integrations.cupy.installation import Installation
from tests.unit.integrations.cupy.conftest import Start
from tests.unit.integrations.cupy.fakes import FakeCupy, array, span

MIB = 1 << 20


def unowned(nbytes: int) -> Any:
    """A pointer of another allocator."""
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 40, nbytes, None, 0), 0)


def test_install_returns_the_pool_given_and_uninstall_restores_everything(
    installation: Installation, gpu: SimDevice, library: FakeCupy
) -> None:
    before = (cupy.cuda.get_allocator(), cupy.get_default_memory_pool())
    methods = dict(vars(library.BaseStream)), dict(vars(library.Event))
    pool = CachingAllocator(gpu, config=Config())
    assert installation.install(pool, current_stream=library.current) is pool
    assert installation.installed and installation.pools() == {0: pool}
    assert cupy.cuda.get_allocator() == installation.malloc
    assert cupy.get_default_memory_pool() is installation.face
    installation.uninstall()
    assert not installation.installed and installation.pools() == {}
    assert (cupy.cuda.get_allocator(), cupy.get_default_memory_pool()) == before
    assert (dict(vars(library.BaseStream)), dict(vars(library.Event))) == methods
    installation.uninstall()
    assert not pool.closed  # the user's
    pool.close()


def test_installing_twice_is_harmless(start: Start, installation: Installation, library: FakeCupy) -> None:
    pool = start()
    before = installation._before
    assert installation.install() is pool
    assert installation.install(pool) is pool
    assert installation._before == before
    wrapped = library.BaseStream.record
    installation.watch.start()
    assert library.BaseStream.record is wrapped


def test_s24_arrays_go_back_to_the_pool_that_made_them_whatever_is_installed(
    installation: Installation, gpu: SimDevice, library: FakeCupy
) -> None:
    pools = [CachingAllocator(gpu, config=Config(), name=str(i)) for i in range(3)]
    held = []
    for pool in pools:
        installation.install(pool, current_stream=library.current)
        held.append(array(MIB))
    installation.uninstall()
    assert [pool.allocated_bytes for pool in pools] == [MIB] * 3
    held.pop(1)
    assert [pool.allocated_bytes for pool in pools] == [MIB, 0, MIB]
    installation.install(pools[1], current_stream=library.current)
    held.clear()
    assert [pool.allocated_bytes for pool in pools] == [0, 0, 0]
    installation.uninstall()
    for pool in pools:
        pool.check()
        pool.close()


def test_s24_the_allocator_may_be_swapped_while_another_thread_allocates(
    installation: Installation, gpu: SimDevice, library: FakeCupy
) -> None:
    pools = [CachingAllocator(gpu, config=Config()) for _ in range(2)]
    installation.install(pools[0], current_stream=library.current)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        held: list[Any] = []
        try:
            while not stop.is_set():
                held.append(array(1000))
                if len(held) > 20:
                    held.pop(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(200):
        installation.install(pools[i % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    installation.uninstall()
    for pool in pools:
        assert pool.allocated_bytes == 0
        pool.check()
        pool.close()


def test_the_streams_are_watched_as_long_as_an_array_of_ours_lives(start: Start, installation: Installation) -> None:
    start()
    a = array(MIB)
    installation.uninstall()
    assert installation.watch.on  # an unseen stream could read it
    del a
    installation.uninstall()
    assert not installation.watch.on


def test_an_allocator_that_the_program_chose_after_us_is_left_alone(start: Start, installation: Installation) -> None:
    start()
    before = installation._before
    assert before is not None
    cupy.cuda.set_allocator(unowned)
    installation.uninstall()
    try:
        assert cupy.cuda.get_allocator() is unowned
    finally:
        cupy.cuda.set_allocator(before[0])


def test_using_allocator_nests_in_both_directions(
    start: Start, installation: Installation, gpu: SimDevice, library: FakeCupy
) -> None:
    pool = start()
    with cupy.cuda.using_allocator(unowned):
        assert array(512).data.ptr == 1 << 40
        with cupy.cuda.using_allocator(installation.malloc):
            inner = array(512)
            assert inner.data.mem.pool is pool
        assert array(512).data.ptr == 1 << 40
        del inner  # freed while another allocator is the current one
        assert pool.allocated_bytes == 0
    assert array(512).data.mem.pool is pool


@pytest.mark.parametrize("what", ["install", "uninstall"])
def test_inside_using_allocator_cupy_refuses_and_nothing_has_changed(
    start: Start, installation: Installation, gpu: SimDevice, what: str
) -> None:
    pool = start()
    other = CachingAllocator(gpu, config=Config())
    with cupy.cuda.using_allocator(installation.malloc), pytest.raises(ValueError, match="using_allocator"):
        installation.install(other) if what == "install" else installation.uninstall()
    assert installation.installed and installation.pools() == {0: pool}
    assert cupy.get_default_memory_pool() is installation.face
    assert array(512).data.mem.pool is pool
    other.close()


def test_wrong_arguments_are_refused_in_words(installation: Installation) -> None:
    with pytest.raises(TypeError, match="CachingAllocator"):
        installation.install(3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="callable"):
        installation.install(current_stream=3)  # type: ignore[arg-type]  # the mistake
    assert not installation.installed


def test_without_a_gpu_install_says_so_in_one_sentence(installation: Installation) -> None:
    if cupy.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(AllocatorError, match=r"CuPy finds no GPU.*weir doctor"):
        installation.install()
    assert not installation.installed and not installation.watch.on


# -- record_stream -----------------------------------------------------------------------------------


def test_s02_record_stream_makes_the_owner_wait_too(
    start: Start, installation: Installation, library: FakeCupy, gpu: SimDevice
) -> None:
    start()
    a, b = library.Stream(non_blocking=True), library.Stream(non_blocking=True)
    with a:
        x = array(2 * MIB)
    gpu.hold(b.ptr)
    b.kernel(reads=(x,))
    installation.record_stream(x[100:].reshape(-1), b)
    where = span(x)[0]
    del x
    with a:
        y = array(2 * MIB)
    a.kernel(writes=(y,))
    assert span(y)[0] != where
    gpu.resume(b.ptr)


def test_record_stream_refuses_what_is_not_ours(start: Start, installation: Installation, library: FakeCupy) -> None:
    start()
    stream = library.Stream()
    with pytest.raises(TypeError, match="CuPy array"):
        installation.record_stream([1, 2], stream)
    with cupy.cuda.using_allocator(unowned):
        theirs = array(512)
    with pytest.raises(ValueError, match="UnownedMemory"):
        installation.record_stream(theirs, stream)
    mine = array(512)
    with pytest.raises(TypeError, match="no stream"):
        installation.record_stream(mine, "s")
    installation.record_stream(array(0), stream)  # nothing is in use
    memory = mine.data.mem
    memory.free()
    installation.record_stream(mine, stream)  # given back: nothing is in use either


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [(None, (None, None)), ("", (None, None)), ("1048576", (MIB, None)), ("25%", (None, 0.25))]
)
def test_cupys_own_limit_setting_is_read_as_cupy_reads_it(text: str | None, expected: tuple[Any, Any]) -> None:
    environ = {} if text is None else {"CUPY_GPU_MEMORY_LIMIT": text}
    assert real.limit_setting(environ) == expected


@pytest.mark.parametrize("text", ["much", "-5", "120%", "-1%", "1.5", "5 %x"])
def test_a_wrong_limit_setting_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="CUPY_GPU_MEMORY_LIMIT"):
        real.limit_setting({"CUPY_GPU_MEMORY_LIMIT": text})


class _Gpu:
    ordinal = 0
    total_memory = 100 * MIB


@pytest.mark.parametrize(
    ("weir", "cupys", "limit"),
    [(None, None, 0), (None, "50%", 50 * MIB), ("30MiB", "50%", 30 * MIB), ("30MiB", None, 30 * MIB), (None, "7", 7)],
)
def test_weirs_limit_wins_over_cupys(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, weir: str | None, cupys: str | None, limit: int
) -> None:
    for name, value in (("WEIR_LIMIT", weir), ("CUPY_GPU_MEMORY_LIMIT", cupys)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert installation._config(_Gpu()).limit == limit  # type: ignore[arg-type]  # all that it looks at


def test_a_limit_set_on_cupys_own_pool_before_is_kept(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Before:
        def get_limit(self) -> int:
            return 11 * MIB

    monkeypatch.setattr(real, "default_pool", Before)
    monkeypatch.setattr(real, "current_device", lambda: 0)
    assert installation._config(_Gpu()).limit == 11 * MIB  # type: ignore[arg-type]  # all that it looks at


def test_other_libraries_that_can_capture_forbid_marks_on_the_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in real.CAPTURING_LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert real.captures_are_known()
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not real.captures_are_known()


# -- the public names --------------------------------------------------------------------------------


def test_the_public_names_are_there_and_lazy() -> None:
    code = (
        "import sys, allocator; assert 'cupy' not in sys.modules; assert callable(allocator.cupy.install);"
        "assert 'cupy' in sys.modules; import allocator.cupy as c; assert sorted(c.__all__) == c.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_cupy_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import allocator\n"
        "try:\n    allocator.cupy\nexcept ImportError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "weir-allocator[cupy]"' in done.stdout


def test_the_module_level_functions_serve_the_process(gpu: SimDevice, library: FakeCupy) -> None:
    before = cupy.cuda.get_allocator()
    pool = CachingAllocator(gpu, config=Config())
    assert allocator.cupy.install(pool, current_stream=library.current) is pool
    try:
        assert allocator.cupy.pools() == {0: pool}
        with cupy.cuda.using_allocator(allocator.cupy.malloc):
            a = array(512)
        assert a.data.mem.pool is pool
        allocator.cupy.record_stream(a, library.Stream())
        allocator.cupy.observe(False)
        allocator.cupy.observe()
        del a
    finally:
        allocator.cupy.uninstall()
    assert cupy.cuda.get_allocator() == before
    pool.check()
    pool.close()
