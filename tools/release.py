#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares the files of a release: checks, a source distribution, notes, checksums and a list of components.

    tools/release.py --tag v0.1.0 --repository owner/name dist/*   (as .github/workflows/release.yml does)
    tools/release.py --dry-run dist/*                               (on any machine; publishes nothing either)

FILES are wheels and one source distribution. The latter is packed anew, with the date of the commit, so that the same
tree gives the same bytes. All files go to --out, with SHA256SUMS, sbom.json (CycloneDX) and notes.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "release"
NAME = "paddle_moe_ops"
WHEEL = re.compile(rf"{NAME}-(?P<version>[\d.]+)\+(?P<local>paddle\d+\.(?:cpu|cu\d+))-cp\d+-cp\d+-\w+\.whl")
INSTALL = """\
A wheel runs with the Paddle that its version names. Install that Paddle first, then:

    pip install "paddle-moe-ops=={version}+{local}" --find-links {links}

Local versions here: {locals}. `sha256sum --check SHA256SUMS` compares the files, and
`gh attestation verify FILE --repo {repository}` says which workflow built one.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="wheels and a source distribution")
    parser.add_argument("--tag", help="such as v0.1.0; in a dry run by default that of this version")
    parser.add_argument("--repository", default="OWNER/NAME", help="on GitHub")
    parser.add_argument("--dry-run", action="store_true", help="a version may still be called unreleased")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    options = parser.parse_args(argv)
    version = runpy.run_path(str(ROOT / NAME / "_version.py"))["__version__"]
    tag = options.tag or (f"v{version}" if options.dry_run else "")
    found = problems(tag, version, changelog_of(version), options.files, dry_run=options.dry_run)
    if found:
        print("\n".join(f"release: {each}" for each in found), file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    made = []
    for file in sorted(options.files):
        made.append(options.out / file.name)
        if file.suffix == ".whl":
            shutil.copyfile(file, made[-1])
        else:
            made[-1].write_bytes(packed_anew(file, date_of_commit()))
    extra = {
        "sbom.json": json.dumps(components(version), indent=1) + "\n",
        "notes.md": notes(version, tag, options.repository, locals_of(options.files)),
    }
    for name, text in extra.items():
        (options.out / name).write_text(text, encoding="utf-8")
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in made)
    (options.out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    print(f"{options.out}: {len(made)} files, SHA256SUMS, {', '.join(extra)}")
    return 0


def problems(tag: str, version: str, changes: str, files: list[Path], *, dry_run: bool) -> list[str]:
    """Return the reasons against a release."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag must be v{version}, but is {tag or 'missing'}")
    if not changes:
        found.append(f"CHANGELOG.md must have a part for {version}, but has none")
    elif "unreleased" in changes.splitlines()[0] and not dry_run:
        found.append(f"CHANGELOG.md must have the date of {version}, but it is called unreleased")
    for file in files:
        matched = WHEEL.fullmatch(file.name)
        if file.name != f"{NAME}-{version}.tar.gz" and (matched is None or matched["version"] != version):
            found.append(f"a file must be a wheel or the source distribution of {version}, but got {file.name}")
    return found


def changelog_of(version: str) -> str:
    """Return the part of CHANGELOG.md about a version, its heading included."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def locals_of(files: list[Path]) -> list[str]:
    """Return the local versions of wheels, such as ``paddle33.cpu``."""
    return sorted({matched["local"] for file in files if (matched := WHEEL.fullmatch(file.name))})


def notes(version: str, tag: str, repository: str, local_versions: list[str]) -> str:
    """Return the text of the release: how to install it, and its changes."""
    links = f"https://github.com/{repository}/releases/expanded_assets/{tag}"
    names = ", ".join(f"`{each}`" for each in local_versions) or "none"
    first = local_versions[0] if local_versions else "paddle33.cpu"
    install = INSTALL.format(version=version, local=first, links=links, locals=names, repository=repository)
    return f"{install}\n{changelog_of(version).partition(chr(10))[2].strip()}\n"


def components(version: str) -> dict[str, Any]:
    """Return the package and what it needs, in CycloneDX; its wheels contain no other code."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    names = [*re.findall(r'"([\w-]+)', listed), "paddlepaddle"]
    licence = {"license": {"id": "Apache-2.0"}}
    package = {"type": "library", "bom-ref": NAME, "name": NAME, "version": version, "licenses": [licence]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": package},
        "components": [_component(each) for each in names],
        "dependencies": [{"ref": NAME, "dependsOn": names}],
    }


def _component(name: str) -> dict[str, str]:
    return {"type": "library", "bom-ref": name, "name": name, "purl": f"pkg:pypi/{name}"}


def date_of_commit() -> int:
    """Return SOURCE_DATE_EPOCH, or else the time of the commit in seconds."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def packed_anew(archive: Path, date: int) -> bytes:
    """Return a .tar.gz with the same files in the order of their names, one date and no owner."""
    packed = io.BytesIO()
    with (
        tarfile.open(archive) as source,
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=date, filename="") as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
