"""The comparison of CuPy's own tests on two pools: the parts that need no GPU."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.cupy_suite import compare

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cupy_tests.cuda_tests.test_memory.TestA" name="test_x"/>
<testcase classname="tests.cupy_tests.cuda_tests.test_memory.TestA" name="test_y"><failure/></testcase>
<testcase classname="tests.cupy_tests.cuda_tests.test_memory.TestA" name="test_z"><error/></testcase>
<testcase classname="tests.cupy_tests.cuda_tests.test_memory.TestA" name="test_s"><skipped/></testcase>
</testsuite></testsuites>"""
A = "tests/cupy_tests/cuda_tests/test_memory/TestA::test_"


def test_a_report_tells_the_outcome_of_each_test(tmp_path: Path) -> None:
    report = tmp_path / "a.xml"
    report.write_text(REPORT)
    assert compare.outcomes(report) == {A + "x": "passed", A + "y": "failed", A + "z": "failed", A + "s": "skipped"}


def test_what_failed_is_asked_for_again_by_file_class_and_name(tmp_path: Path) -> None:
    (tmp_path / "tests/deep").mkdir(parents=True)
    (tmp_path / "tests/deep/test_a.py").touch()
    report = tmp_path / "a.xml"
    report.write_text("""<testsuites><testsuite>
<testcase classname="tests.deep.test_a.TestA_param_0_{q=0.5}" name="test_x[1.5]"><failure/></testcase>
<testcase classname="tests.deep.test_a" name="test_y"><error/></testcase>
<testcase classname="tests.deep.test_a" name="test_z"/>
</testsuite></testsuites>""")
    assert compare.failed(report, tmp_path) == [
        "tests/deep/test_a.py::TestA_param_0_{q=0.5}::test_x[1.5]",
        "tests/deep/test_a.py::test_y",
    ]


@pytest.mark.parametrize("some", [False, True], ids=["both run all", "CuPy's pool runs what failed"])
def test_a_test_that_ran_in_one_of_the_two_only_is_no_success(some: bool, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"both": "failed"} if some else {"both": "failed", "fine": "passed"}
    assert compare.told({"both": "failed", "fine": "passed"}, theirs, some=some) == 0
    assert "ran in one of the two only" not in capsys.readouterr().out
    assert compare.told({"both": "failed", "fine": "passed"}, {}, some=some) == 1
    assert "tests ran in one of the two only" in capsys.readouterr().out


def test_only_what_fails_on_weir_alone_and_is_not_listed_counts() -> None:
    theirs = {"both": "failed", "ours": "passed", "listed": "passed", "skipped there": "skipped", "fine": "passed"}
    ours = {"both": "failed", "ours": "failed", "listed": "failed", "skipped there": "failed", "fine": "passed"}
    assert compare.differences(ours, theirs, ["list*"]) == (["ours", "skipped there"], ["listed"])


def test_every_pattern_of_the_list_is_about_tests_of_the_pool_itself() -> None:
    patterns = compare.patterns()
    assert patterns
    for pattern in patterns:
        assert "/test_memory/Test" in pattern, f"{pattern}: too wide a pattern hides defects"


def test_only_the_tests_are_taken_out_of_the_distribution(tmp_path: Path) -> None:
    archive = tmp_path / "cupy-14.2.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("cupy/__init__.py", "tests/cupy_tests/test_a.py", "pyproject.toml", "setup.py"):
            member = tarfile.TarInfo(f"cupy-14.2.0/{name}")
            tar.addfile(member, io.BytesIO())
    where = compare.unpack(archive, tmp_path / "out")
    assert sorted(str(p.relative_to(where)) for p in where.rglob("*.*")) == [
        "pyproject.toml",
        "tests/cupy_tests/test_a.py",
    ]


def test_another_archive_is_refused_in_words(tmp_path: Path) -> None:
    archive = tmp_path / "other.tar.gz"
    with tarfile.open(archive, "w:gz"):
        pass
    with pytest.raises(SystemExit, match="not CuPy's source distribution"):
        compare.unpack(archive, tmp_path / "out")
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "none.tar.gz")])
