#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Blank the CUDA device code inside shared libraries, so that it compresses to almost nothing.

The 2.6.2 GPU wheel of Paddle contains 2 GB of machine code for sm_61 to sm_86, none of which runs on sm_90. Without it
the host side still works on such a GPU: tensors on GPUPlace, copies, streams, custom operators with their own kernels.

    strip_device_code.py LIBRARY...      (changes the files in place)

Walks the fat binaries (magic 0xBA55ED50: 16-byte header, then entries of kind, version, header size, payload size)
in the ELF sections .nv_fatbin and __nv_relfatbin, and zeroes every payload; headers and sizes do not change.
"""

import mmap
import struct
import sys

FATBIN_MAGIC = 0xBA55ED50
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


def device_code_ranges(elf):
    """Yield (offset, size) of each ELF section with device code."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _type, _flags, _address, offset, size in headers:
        end = elf.find(b"\0", names + name)
        if elf[names + name : end] in SECTIONS:
            yield offset, size


def blank(path):
    """Zero every device-code payload of one library; return the number of bytes blanked."""
    blanked = 0
    with open(path, "r+b") as handle, mmap.mmap(handle.fileno(), 0) as elf:
        for start, size in device_code_ranges(elf):
            at = start
            while at < start + size:
                if struct.unpack_from("<I", elf, at)[0] != FATBIN_MAGIC:
                    at += 8
                    continue
                header, body = struct.unpack_from("<HQ", elf, at + 6)
                entry, at = at + header, at + header + body
                while entry < at:
                    entry_header, payload = struct.unpack_from("<IQ", elf, entry + 4)
                    elf[entry + entry_header : entry + entry_header + payload] = bytes(payload)
                    blanked += payload
                    entry += entry_header + payload
    return blanked


if __name__ == "__main__":
    for library in sys.argv[1:]:
        print(f"{library}: {blank(library) / 1e6:.0f} MB blanked")
