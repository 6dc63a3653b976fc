"""Load a configuration: file, then what `--flashrecovery` says, then `key=value` settings, then validation. Errors name
the file and the key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from flashrec.config.schema import Config


class ConfigError(Exception):
    """The configuration cannot be used; the message says which key and why."""


class _Loader(yaml.SafeLoader):
    """`off`, `on`, `no` and `yes` are words, as in YAML 1.2: some settings have such values."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false)$", re.IGNORECASE), list("tTfF"))


def load_config(
    path: Path | None = None, settings: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read `path` (YAML; none: defaults), lay `overrides` (dotted key: value) over it, and over both the `key=value`
    settings. Raises ConfigError."""
    where = str(path) if path else "settings"
    data = _read(path) if path else {}
    for key, value in (overrides or {}).items():
        _put(data, key, value, f"{key}={value}")
    for setting in settings:
        _apply(data, setting)
    try:
        return msgspec.convert(data, Config, str_keys=True)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{where}: {_explain(str(err))}") from err


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), _Loader)
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} is not YAML: {err}") from err
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, found a {type(data).__name__}")
    return data


def _apply(data: dict[str, Any], setting: str) -> None:
    key, equals, value = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"setting {setting!r}: expected key=value, for example detection.dead_after_s=3")
    try:
        _put(data, key, yaml.load(value, _Loader), setting)
    except yaml.YAMLError as err:
        raise ConfigError(f"setting {setting!r}: the value is not YAML: {err}") from err


def _put(data: dict[str, Any], key: str, value: Any, setting: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"setting {setting!r}: {parent} is a value, not a section")
    data[last] = value


def _explain(text: str) -> str:
    if "unknown field" not in text:
        return text
    known = ", ".join(_keys(Config))
    return f"{text}. Known keys: {known}"


def _keys(struct: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys += _keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(prefix + field.name)
    return keys
