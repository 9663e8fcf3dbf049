"""Rules of the project that hold for every file: imports, names, sizes, and what the packages hold."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import snnpart
from snnpart.frameworks import packages

ROOT = Path(__file__).parents[1]
FOLDERS = ("snnpart", "passes", "runtime", "tests", "tools", "examples")
FRAMEWORKS = (*packages(), "megatron", "sglang")


def sources(*folders: str) -> list[Path]:
    """The Python files under the folders, each once: the links snnpart/passes and snnpart/runtime are left out."""
    found: list[Path] = []
    for folder in folders:
        linked = [path for path in (ROOT / folder).iterdir() if path.is_symlink()]
        paths = (path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts)
        found += [path for path in paths if not any(link in path.parents for link in linked)]
    return found


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of the modules that the file imports, with lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def offences(paths: list[Path], pattern: str) -> list[str]:
    """`file:line name` of every import that matches."""
    rule = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{line} {name}" for path in paths for name, line in imports(path) if rule.match(name)
    ]


def test_passes_and_runtime_are_imported_through_snnpart_only() -> None:
    assert offences(sources(*FOLDERS), r"(passes|runtime)(\.|$)") == []


def test_passes_and_runtime_never_import_each_other() -> None:
    assert offences(sources("passes"), r"snnpart\.runtime(\.|$)") == []
    assert offences(sources("runtime"), r"snnpart\.passes(\.|$)") == []


def test_only_the_doors_know_passes_and_runtime() -> None:
    doors = {"api.py", "cli.py", "run.py", "profile.py", "__main__.py", "layers.py"}
    entry_points = {"vision"}
    core = [p for p in sources("snnpart") if p.name not in doors and not entry_points & set(p.parts)]
    assert offences(core, r"snnpart\.runtime(\.|$)") == []


def test_private_torch_modules_are_imported_in_compat_only() -> None:
    allowed = r"torch\.utils\._pytree|torch\.(_dynamo|_inductor)$"
    private = r"(?!(" + allowed + r"))torch(\.\w+)*\._(?!_)\w+"
    others = [path for path in sources("snnpart", "passes", "runtime") if path.name != "compat.py"]
    assert offences(others, private) == []


def test_a_framework_is_imported_by_its_adapter_only() -> None:
    for path in sources("snnpart", "passes", "runtime"):
        allowed = path.parent.name == "frameworks" and path.stem.split("_")[0] in FRAMEWORKS
        if not allowed and "vision" not in path.parts:
            assert offences([path], rf"({'|'.join(FRAMEWORKS)})(\.|$)") == []


def test_a_framework_is_named_in_its_adapter_files_only() -> None:
    rule = re.compile(rf"\b({'|'.join(FRAMEWORKS)})\b", re.IGNORECASE)
    for path in sources("snnpart", "passes", "runtime"):
        if path.parent.name != "frameworks" and "vision" not in path.parts:
            lines = path.read_text(encoding="utf-8").splitlines()
            named = [f"{path.relative_to(ROOT)}:{i + 1} {line}" for i, line in enumerate(lines) if rule.search(line)]
            assert named == []


def test_there_are_at_most_ten_public_names() -> None:
    names = [name for name in getattr(snnpart, "__all__", dir(snnpart)) if not name.startswith("_")]
    assert 1 <= len(names) <= 10, names
    assert all(hasattr(snnpart, name) for name in names)


def test_no_file_is_over_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources(*FOLDERS) if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_are_short() -> None:
    paths = sources("snnpart", "passes", "runtime")
    long = {f"{path.relative_to(ROOT)} {name}": size for path in paths for name, size in functions(path) if size > 60}
    doors = {"snnpart/api.py parallelize"}  # its arguments are documented one by one
    assert set(long) <= doors, long


def tracked() -> list[Path]:
    """The files that git knows; skipped where this is no checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_nothing_of_one_machine_is_in_the_repository() -> None:
    forbidden = re.compile(
        "|".join(("/wo" + "rk/", r"\.lib" + "rary", "/opt/wh" + "eels", "/opt/py" + "pi", "files.python" + "hosted"))
    )
    found = []
    for path in tracked():
        if not path.is_symlink() and path.suffix not in (".png", ".npz"):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}:{i + 1}" for i, line in enumerate(lines) if forbidden.search(line)]
    assert found == []


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == snnpart.__version__
    assert f"## {snnpart.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_extras_are_those_that_are_documented() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert extras == {
        "spikingjelly", "snntorch", "norse", "sinabs", "vision", "triton", "megatron", "sglang", "docs", "test",
    }  # fmt: skip


def test_links_are_relative() -> None:
    for name in ("passes", "runtime"):
        assert (ROOT / "snnpart" / name).readlink() == Path(f"../{name}")


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *[f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")]]
)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_wheel_and_sdist_hold_passes_and_runtime(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("snnpart", "passes", "runtime"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened, tarfile.open(sdist) as archive:
        names, sources_of = set(opened.namelist()), {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"snnpart/passes/__init__.py", "snnpart/runtime/__init__.py", "snnpart/py.typed", "snnpart/report/page.js"}
    assert wanted <= names and wanted <= sources_of
    assert not any(name.startswith(("tests", "passes", "runtime")) for name in names)
