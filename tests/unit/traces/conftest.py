"""Files for the tests of readers."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(content, packed=False) -> path.  Content is text, bytes, or anything else to be pickled."""

    def write(content: object, *, packed: bool = False, name: str = "trace") -> str:
        data = content.encode() if isinstance(content, str) else content
        if not isinstance(data, bytes):
            data = pickle.dumps(data)
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if packed else data)
        return str(path)

    return write
