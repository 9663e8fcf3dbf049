"""A process takes its place, or leaves nothing behind. Several ranks: tests/distributed/test_launch.py."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from snnpart.errors import ConfigError
from snnpart.runtime.ranks import join


def test_a_join_that_fails_ends_the_process_group_that_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins its own, and closes it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    cpu, wait = torch.device("cpu"), timedelta(seconds=20)
    with pytest.raises(ConfigError, match=r"pp \* tp = 2 \* 1 = 2 does not divide"):
        join(2, 1, device=cpu, timeout=wait)
    assert not dist.is_initialized()
    ranks = join(1, 1, device=cpu, timeout=wait)
    assert ranks.owns_world and dist.is_initialized()
    ranks.close()
    assert not dist.is_initialized()
