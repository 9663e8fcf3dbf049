"""`snnpart doctor`: what is here, what is missing, and the command that installs it.

Packages and extras are read from the installed metadata of snnpart itself, so that this list never differs from
pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import snnpart

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*?)\s*(?:;(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_PROGRAMS = (
    ("c++", "compiles fused kernels", "apt-get install g++"),
    ("chromium", "opens the report page in a test", "apt-get install chromium"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and the command that mends it (empty: nothing to do)."""

    group: Literal["versions", "devices", "links", "optional"]
    name: str
    found: str
    mend: str = ""
    required: bool = False


def examine() -> tuple[Finding, ...]:
    """Everything the doctor looks at, in the order of the groups."""
    return (*_versions(), *_devices(), *_links(), *_optional())


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing that snnpart needs is missing; optional things do not count."""
    return not any(finding.required and finding.mend for finding in findings)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "snnpart", snnpart.__version__)
    yield Finding("versions", "python", platform.python_version())
    for name, wanted, extra in requirements():
        if not extra:
            yield _package(name, wanted, f"pip install '{name}{wanted}'", required=True)


def _package(name: str, wanted: str, command: str, *, required: bool = False) -> Finding:
    group: Literal["versions", "optional"] = "versions" if required else "optional"
    version = installed(name)
    if version is None:
        return Finding(group, name, "missing", command, required)
    least = re.search(r">=\s*([\d.]+)", wanted)
    if least is not None and release(version) < release(least[1]):
        return Finding(group, name, f"{version}, older than {least[1]}", command, required)
    return Finding(group, name, version, required=required)


def requirements() -> Iterator[tuple[str, str, str]]:
    """Name, version condition and extra ("" for none) of every requirement of snnpart."""
    for text in _listed():
        match = _REQUIREMENT.fullmatch(text)
        if match is not None:
            extra = _EXTRA.search(match[3] or "")
            yield match[1], match[2].strip(), extra[1] if extra else ""


def _listed() -> list[str]:
    """Requirements as the installed metadata lists them; from pyproject.toml when snnpart runs uninstalled."""
    try:
        return metadata.requires("snnpart") or []
    except metadata.PackageNotFoundError:
        source = Path(snnpart.__file__).parents[1] / "pyproject.toml"
        if not source.is_file():
            return []
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    marked = [f"{text}; extra == '{extra}'" for extra, texts in extras for text in texts]
    return [*project["dependencies"], *marked]


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.14.1+cpu` -> (2, 14, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _devices() -> Iterator[Finding]:
    yield Finding("devices", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use by torch")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            known = torch.cuda.get_device_properties(index)
            yield Finding("devices", f"cuda:{index}", f"{known.name}, {known.total_memory / 2**30:.0f} GiB")
    elif torch.version.cuda:
        yield Finding(
            "devices", "cuda", f"none (torch is built for CUDA {torch.version.cuda}); programs run on the CPU"
        )
    else:
        yield Finding("devices", "cuda", "none (torch is built for the CPU)")


def _links() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("links", "torch.distributed", "missing", "pip install torch", required=True)
        return
    yield Finding("links", "gloo", "there" if dist.is_gloo_available() else "not built in: CPU ranks cannot talk")
    yield Finding("links", "nccl", "there" if dist.is_nccl_available() else "not built in: only CPU ranks")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for first in range(count):
        peers = [str(other) for other in range(count) if other != first and _reaches(first, other)]
        if count > 1:
            yield Finding("links", f"cuda:{first}", f"direct access to {', '.join(peers) or 'no other device'}")


def _reaches(first: int, second: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(first, second))


def _optional() -> Iterator[Finding]:
    seen = set()
    for name, wanted, extra in requirements():
        if extra and extra not in ("test", "docs") and name not in seen:
            seen.add(name)
            yield _package(name, wanted, f"pip install 'snnpart[{extra}]'")
    for program, purpose, command in _PROGRAMS:
        path = shutil.which(program)
        yield Finding("optional", program, path or f"missing; {purpose}", "" if path else command)
