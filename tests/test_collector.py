"""The collector is as it was after the block, however it is left."""

from __future__ import annotations

import gc

import pytest

from snnpart.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_waits_inside_the_block_only(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
