"""Starts the two ranks of `jobs_heartbeat`, and gives what rank 0 said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said(how: str, device: str, patience: float = 150.0) -> tuple[int, str]:
    """Exit code and stderr of rank 0, after rank 1 has died or hung."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "CASE_DEVICE": device}
    ranks = []
    for rank in ("0", "1"):
        environment = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.gpu.jobs_heartbeat", how]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        _, text = ranks[0].communicate(timeout=patience)
        return ranks[0].returncode, text
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
