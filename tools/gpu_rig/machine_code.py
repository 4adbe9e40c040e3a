#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a hash of the machine code of each object of the bundle, and the sources that it is compiled from, as json.

    machine_code.py core rig jitter > build/gpu/rig-2/machine_code.json

The hash covers code, constants, relocations, and registers and shared memory of kernels. It leaves out names of files,
line numbers and debug information, so a changed comment does not change it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "gpu" / "objects"
SOURCES = Path("paddle_moe_ops/csrc")
# Sections that decide results; `.nv.info` without a kernel's name holds indices of symbols.
HASHED = re.compile(rb"\.(text|rodata|data|bss|init_array|nv\.(constant|global|shared|info\.))")
# Names of anonymous namespaces contain hashes of the file.
FILE_HASHES = re.compile(rb"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(_\d+_\w+?_)[0-9a-f]{8}")
RELA, NOBITS = 4, 8
SECTION_SYMBOL = 3


class Section(NamedTuple):
    """A section of an ELF file; `size` also covers sections without data."""

    name: bytes
    kind: int
    size: int
    data: bytes
    link: int
    info: int


def sections_of(elf: bytes) -> list[Section]:
    """Return all sections of a 64-bit little-endian ELF file."""
    start, size, count, names = *struct.unpack_from("<Q", elf, 0x28), *struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + number * size) for number in range(count)]
    data = [b"" if header[1] == NOBITS else elf[header[4] : header[4] + header[5]] for header in headers]
    return [
        Section(without_file_hashes(text_at(data[names], header[0])), header[1], header[5], held, *header[6:8])
        for header, held in zip(headers, data, strict=True)
    ]


def text_at(strings: bytes, offset: int) -> bytes:
    return strings[offset : strings.index(b"\0", offset)]


def without_file_hashes(text: bytes) -> bytes:
    return FILE_HASHES.sub(rb"\1\2", text)


def relocations(section: Section, sections: list[Section]) -> Iterator[bytes]:
    """Yield place, kind, symbol's name and addend of each relocation."""
    symbols = sections[section.link]
    for offset, info, addend in struct.iter_unpack("<QQq", section.data):
        name, kind, _, index = struct.unpack_from("<IBBH", symbols.data, (info >> 32) * 24)
        is_section = kind & 15 == SECTION_SYMBOL
        symbol = sections[index].name if is_section else text_at(sections[symbols.link].data, name)
        yield b"%d %d %d " % (offset, info & 0xFFFFFFFF, addend) + without_file_hashes(symbol)


def hashed_parts(elf: bytes) -> list[bytes]:
    """Return the hashed sections and their relocations, in an order that does not depend on names of files."""
    sections, parts = sections_of(elf), []
    for section in sections:
        if section.kind == RELA and HASHED.match(sections[section.info].name):
            parts.append(section.name + b"\n" + b"\n".join(relocations(section, sections)))
        elif section.kind != RELA and HASHED.match(section.name):
            parts.append(section.name + b" %d\n" % section.size + without_file_hashes(section.data))
    return sorted(parts)


def device_code(compiled: Path) -> list[bytes]:
    """Return the ELF files of the kernels in an object of nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump(), "-xelf", "all", str(compiled.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [file.read_bytes() for file in sorted(Path(folder).iterdir())]


def cuobjdump() -> str:
    """Return the path of cuobjdump, in CUDA or else in Triton."""
    if (found := shutil.which("cuobjdump")) is not None:
        return found
    if (triton := importlib.util.find_spec("triton")) is None or triton.origin is None:
        raise SystemExit("machine_code.py: neither CUDA nor Triton has cuobjdump here")
    return str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def machine_code_hash(compiled: Path) -> str:
    """Return a hash of an object's code for the host and for GPUs."""
    files = [compiled.read_bytes(), *(device_code(compiled) if compiled.name.endswith(".cu.o") else [])]
    whole = hashlib.sha256()
    for part in (part for elf in files for part in hashed_parts(elf)):
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def units(folder: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each object in a folder of OBJECTS that runs with a GPU: its hash and its sources."""
    for compiled in sorted((OBJECTS / folder).rglob("*.o")):
        path = compiled.relative_to(OBJECTS / folder).with_suffix("")
        source = path if path.suffix == ".cu" else path.with_suffix(".cc")
        if path.parts[0] == "cpu" or not (ROOT / SOURCES / source).exists():
            continue
        words = compiled.with_suffix(".d").read_text().split()
        sources = sorted(word for word in words if word.startswith(f"{SOURCES}/") and not word.endswith(":"))
        yield f"{folder}/{source}", {"hash": machine_code_hash(compiled), "sources": sources}


if __name__ == "__main__":
    print(json.dumps(dict(unit for folder in sys.argv[1:] for unit in units(folder)), indent=1))
