"""Each mistake in locking, draining and accounting must be noticed."""

from __future__ import annotations

import pytest

from tests.model.mutants import Mutant
from tests.schedules.mutants import ACCOUNTS_OF, MUTANTS, killed

pytestmark = pytest.mark.source
"""The orders are those of the source's own steps."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    assert killed(mutant) is not None


@pytest.mark.parametrize("name", ACCOUNTS_OF)
def test_the_statistics_say_what_the_program_did(name: str) -> None:
    assert ACCOUNTS_OF[name]() is None


def test_locking_draining_and_accounting_have_mutants() -> None:
    kinds = [mutant.name.partition("_")[0] for mutant in MUTANTS]
    assert set(kinds) == {"lock", "drain", "queue", "account"} and len(set(MUTANTS)) == len(MUTANTS)
    assert min(kinds.count("lock"), kinds.count("drain"), kinds.count("account")) >= 8
