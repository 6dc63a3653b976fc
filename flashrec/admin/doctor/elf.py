"""Reads what a SPANK plugin says about itself out of its file, without loading it (its code would run in us).

Slurm looks at three data symbols before it loads a plugin: `plugin_name`, `plugin_type` and `plugin_version`, the
version of the Slurm it was built for: (major << 16) | (minor << 8) | micro. Ours has `flashrec_contract` besides.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

CONTRACT = "flashrec_contract"
_MAX_FILE_BYTES = 64 * 1024 * 1024
_MAX_TEXT_BYTES = 256
_DYNSYM = 11  # section type of the symbols a loader sees
_LOAD = 1  # program header: a part of the file that is mapped


class NotAPlugin(ValueError):
    """The file is no ELF file that we can read, or lacks Slurm's symbols."""


class PluginFile(msgspec.Struct, frozen=True):
    """contract: its `flashrec_contract`, '' if it has none. symbols: names of everything the file exports."""

    name: str
    plugin_type: str
    built_for: tuple[int, int, int]
    contract: str
    symbols: frozenset[str]


def read_plugin(path: Path) -> PluginFile:
    """Raises OSError, or NotAPlugin with the reason."""
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise NotAPlugin(f"{path} is too large for a plugin")
    data = path.read_bytes()
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise NotAPlugin(f"{path} is not an ELF file")
    if data[4] != 2:
        raise NotAPlugin(f"{path} is not built for a 64-bit machine")
    try:
        return _read(data, "<" if data[5] == 1 else ">", path)
    except (struct.error, IndexError) as error:
        raise NotAPlugin(f"{path} is damaged: {error}") from error


def _read(data: bytes, order: str, path: Path) -> PluginFile:
    segments = _segments(data, order)
    symbols = _symbols(data, order)
    missing = [name for name in ("plugin_name", "plugin_type", "plugin_version") if name not in symbols]
    if missing:
        raise NotAPlugin(f"{path} has no symbol {missing[0]}: not a plugin of Slurm")
    (version,) = struct.unpack_from(order + "I", data, _offset(symbols["plugin_version"], segments))
    name, kind = (_text(data, _offset(symbols[key], segments)) for key in ("plugin_name", "plugin_type"))
    contract = _text(data, _offset(symbols[CONTRACT], segments)) if CONTRACT in symbols else ""
    release = (version >> 16 & 0xFF, version >> 8 & 0xFF, version & 0xFF)
    return PluginFile(name, kind, release, contract, frozenset(symbols))


def _segments(data: bytes, order: str) -> list[tuple[int, int, int]]:
    """(address, offset in the file, size there) of all that is loaded."""
    (start,) = struct.unpack_from(order + "Q", data, 32)
    size, count = struct.unpack_from(order + "HH", data, 54)
    found = []
    for i in range(count):
        kind, _, offset, address, _, in_file = struct.unpack_from(order + "IIQQQQ", data, start + i * size)
        if kind == _LOAD:
            found.append((address, offset, in_file))
    return found


def _symbols(data: bytes, order: str) -> dict[str, int]:
    """Defined dynamic symbols: name to address."""
    (start,) = struct.unpack_from(order + "Q", data, 40)
    size, count = struct.unpack_from(order + "HH", data, 58)
    sections = [struct.unpack_from(order + "IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    found: dict[str, int] = {}
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != _DYNSYM or not entry:
            continue
        names = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, _, _, section, address, _ = struct.unpack_from(order + "IBBHQQ", data, at)
            if section and name:
                found[_text(data, names + name)] = address
    return found


def _offset(address: int, segments: list[tuple[int, int, int]]) -> int:
    for start, offset, size in segments:
        if start <= address < start + size:
            return address - start + offset
    raise IndexError(f"address {address:#x} is not in the file")


def _text(data: bytes, at: int) -> str:
    return data[at : at + _MAX_TEXT_BYTES].split(b"\0", 1)[0].decode(errors="replace")
