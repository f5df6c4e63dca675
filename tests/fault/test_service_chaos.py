"""Two minutes of a storm: nothing wrong is answered, nothing is lost without a word, and the deployment heals alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_storm import open_storm

SECONDS = 120.0
CLIENTS = 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_storm_changes_no_token_loses_no_request_and_is_healed_from(tmp_path: Path) -> None:
    with open_storm(tmp_path, seed=1) as storm:
        storm.run(SECONDS, CLIENTS)
        tally = storm.tally
    assert not tally.violations, "\n".join(tally.violations[:20])
    # The storm was one: each kind of fault struck, and the answers could tell one version from another.
    assert len([name for name in tally.faults if not name.startswith("found no")]) >= 4, tally.faults
    assert tally.outcomes["answered"] > 100, tally.outcomes
    assert len(storm.policies) > 10
    assert tally.telling_tokens > 0.9 * tally.tokens
