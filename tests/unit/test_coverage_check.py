"""The judge of coverage: each of its two bounds is a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.coverage_check import main


@pytest.fixture
def report(tmp_path: Path) -> str:
    def file(lines: int, missing: list[int], branches: int, taken: int) -> dict[str, object]:
        summary = {
            "num_statements": lines,
            "covered_lines": lines - len(missing),
            "num_branches": branches,
            "covered_branches": taken,
        }
        return {"summary": summary, "missing_lines": missing}

    path = tmp_path / "coverage.json"
    files = {
        "allocator/good.py": file(90, [], 10, 10),
        "allocator/bad.py": file(10, [3, 4], 10, 8),
        "allocator/integrations/far.py": file(100, list(range(100)), 50, 0),
    }
    path.write_text(json.dumps({"files": files}))
    return str(path)


@pytest.mark.parametrize(
    ("bounds", "status", "says"),
    [
        (["--lines", "98", "--branches", "90"], 0, "enough"),
        (["--lines", "98.1", "--branches", "90"], 1, "lines below 98.1 %"),
        (["--lines", "98", "--branches", "90.1"], 1, "branches below 90.1 %"),
        (["--lines", "99", "--branches", "99"], 1, "lines below 99 % and branches below 99 %"),
        (["--apart", "nothing"], 1, "lines below 97 % and branches below 92 %"),
    ],
)
def test_either_bound_fails_alone(
    report: str, bounds: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([report, *bounds]) == status
    assert capsys.readouterr().out.splitlines()[-1] == f"coverage: {says}"


def test_what_is_missing_most_is_named_and_what_needs_a_gpu_is_not(
    report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([report])
    out = capsys.readouterr().out
    assert "allocator/bad.py: 2 lines missing, 3, 4" in out and "2 files: 98.00 % of lines, 90.00 % of branches" in out
    assert "good.py" not in out and "far.py" not in out


def test_a_report_about_nothing_is_no_success(report: str) -> None:
    assert main([report, "--apart", "allocator/*"]) == 2
