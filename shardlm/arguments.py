"""The command line and the YAML files: text in, `Config` out.

`shardlm.config` defines the keys; this module only reads them. A flag and a line of YAML go
through the same reader, so `1e-4` is a number and `false` is false in both. Whatever cannot be
used is a `ConfigError` with one readable message, which `parse_config` turns into exit status 2.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import jsonargparse
import yaml

from shardlm.config import Config, ConfigError, flatten, validate


def parse_config(
    argv: Sequence[str] | None = None, prog: str = "shardlm", description: str = ""
) -> Config:
    """Read `--config FILE.yaml` (any number of times) and dotted flags; what comes later wins.

    `--help` and `--print_config` print and exit with status 0.

    Args:
      argv: arguments without the program's name; default: those of the process.
      prog: name in messages.
      description: first line of the help.

    Returns:
      The configuration, checked by `shardlm.config.validate`.

    Raises:
      SystemExit: status 2 after one message on standard error, for any mistake.
    """
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        description=description,
        usage="%(prog)s [--config FILE.yaml] [--KEY VALUE]...",
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
        print_config=None,
    )
    parser.add_argument(
        "--config",
        action=_ConfigAction,
        default=argparse.SUPPRESS,
        metavar="FILE.yaml",
        help="Read keys from a file; flags and files that come later win.",
    )
    parser.add_argument(
        "--print_config", action="store_true", help="Print the resolved configuration and exit."
    )
    groups = {name: parser.add_argument_group(title) for name, title in _sections().items()}
    for key, kind in _kinds().items():
        groups[key.rpartition(".")[0]].add_argument(
            f"--{key}",
            default=kind.default,
            metavar=kind.metavar,
            help=f"{kind.help} (type: {kind.name}; default: {_plain(kind.default)})".replace(
                "%", "%%"
            ),
            action=_KeyAction,
            nargs="+" if kind.many else None,
        )
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        _check_flags(argv)
        values = parser.parse_args(argv)
        config = _build({key: values[key] for key in _kinds()})
        validate(config)
    except (argparse.ArgumentError, ConfigError) as error:
        message = str(error).removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            message += " (write --KEY VALUE; --help lists the keys)"
        sys.stderr.write(f"{prog}: {message}\n")
        raise SystemExit(2) from None
    if values["print_config"]:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """YAML text that `from_yaml` turns into an equal configuration."""
    nested: dict[str, Any] = {}
    for key, value in flatten(config).items():
        *path, name = key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[name] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(nested, sort_keys=False, width=100)


def from_yaml(text: str, name: str = "configuration") -> Config:
    """Configuration from YAML text; keys that it leaves out have their defaults.

    Args:
      text: nested or dotted keys.
      name: what messages call the text, usually a path.

    Raises:
      ConfigError: bad YAML, an unknown or repeated key, a value of the wrong type; with the line.
        The values are not checked against each other (`shardlm.config.validate`).
    """
    return _build(_read(text, name))


def difference(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, as (key, value in `a`, value in `b`), in order."""
    other = flatten(b)
    return [(key, old, other[key]) for key, old in flatten(a).items() if old != other[key]]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A key: how its text is read, and what help says about it."""

    key: str
    type: Any
    """The annotation without the `| None`."""
    optional: bool
    default: Any
    help: str

    @property
    def many(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def item(self) -> Any:
        return typing.get_args(self.type)[0] if self.many else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def name(self) -> str:
        name = "|".join(self.choices) or self.item.__name__
        return name + (" list" if self.many else "") + (" or null" if self.optional else "")

    @property
    def metavar(self) -> str:
        return self.key.rpartition(".")[2].upper()

    def from_flag(self, text: str | list[str]) -> Any:
        """Value of a flag. Text is taken as it stands, everything else is read as YAML."""
        if isinstance(text, list):
            if len(text) == 1 and text[0].startswith("[") and text[0].endswith("]"):
                return self.convert(_scalar(text[0]))
            return self.convert([t if self.item is str else _scalar(t) for t in text])
        return self.convert(text if self.item is str or self.choices else _scalar(text))

    def convert(self, value: Any) -> Any:
        """The value as the field's type; a value that is one already stays itself."""
        if value is None and self.optional:
            return None
        if self.many:
            values = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._one(v) for v in values)
        return self._one(value)

    def _one(self, value: Any) -> Any:
        kind = self.item
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is bool:
            if isinstance(value, (bool, int)) and value in (0, 1):
                return bool(value)
            self._refuse(value, "true or false")
        elif kind is int:
            if number and isinstance(value, int):
                return value
            hint = f" (write {int(value)})" if number and value == value // 1 else ""
            self._refuse(value, f"a whole number{hint}")
        elif kind is float:
            if number and math.isfinite(value):
                return float(value)
            self._refuse(value, "a finite number")
        elif self.choices:
            if value in self.choices:
                return value
            close = difflib.get_close_matches(str(value), self.choices, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self._refuse(value, f"one of {', '.join(self.choices)}{hint}")
        elif isinstance(value, str):
            return value
        self._refuse(value, "text (in YAML, put it in quotes)")

    def _refuse(self, value: Any, wanted: str) -> NoReturn:
        also = ", or null" if self.optional else ""
        shown = repr(value) if isinstance(value, str) else _plain(value)
        raise ConfigError(f"{self.key} is {shown}: it must be {wanted}{also}")


def _plain(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        text = str(value)
        return text if text.isprintable() else repr(text)
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


class _ConfigAction(argparse.Action):
    """Puts the keys of a file into the namespace, where later flags overwrite them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        for key, value in _read_file(values).items():
            namespace[key] = value


class _KeyAction(argparse.Action):
    """Puts the value of a flag into the namespace."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace[self.dest] = _kinds()[self.dest].from_flag(values)


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but `1e-4` is a number, as in YAML 1.2, and dates are text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if not tag.endswith(("float", "timestamp"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _scalar(text: str) -> Any:
    """A flag's text as YAML; what is not YAML is text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a YAML file") from None
    return _read(text, path)


def _read(text: str, name: str) -> dict[str, Any]:
    """Dotted keys and converted values of YAML text."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        seen: dict[str, tuple[int, Any]] = {}
        if root is not None:
            _walk(root, "", name, loader, seen)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name}: not valid YAML: {reason}") from None
    return {key: value for key, (_, value) in seen.items()}


def _walk(node: Any, prefix: str, name: str, loader: Any, seen: dict[str, tuple[int, Any]]) -> None:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        if prefix and node.tag == "tag:yaml.org,2002:null":
            return
        what = f"{prefix.rstrip('.')} is a section" if prefix else "a configuration has sections"
        example = next(key for key in _kinds() if key.startswith(prefix))
        raise ConfigError(f"{name}:{line}: {what}: write keys below it, as in {example}: VALUE")
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value if isinstance(key_node, yaml.ScalarNode) else '?'}"
        line = key_node.start_mark.line + 1
        if key in _sections():
            _walk(value_node, f"{key}.", name, loader, seen)
            continue
        if key not in _kinds():
            raise ConfigError(f"{name}:{line}: {key} is not a key{_suggestion(key)}")
        if key in seen:
            raise ConfigError(f"{name}:{line}: {key} is given twice (also line {seen[key][0]})")
        try:
            value = _kinds()[key].convert(loader.construct_object(value_node, deep=True))
        except ConfigError as error:
            raise ConfigError(f"{name}:{line}: {error}") from None
        seen[key] = (line, value)


def _check_flags(argv: Iterable[str]) -> None:
    """Refuse flags that do not exist with the key that was probably meant."""
    for word in argv:
        flag, _, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag in ("config", "print_config", "help"):
            continue
        if flag in _sections():
            example = next(key for key in _kinds() if key.startswith(f"{flag}."))
            raise ConfigError(f"--{flag} is a section: set its keys, as in --{example} VALUE")
        if flag not in _kinds():
            raise ConfigError(f"--{flag} is not a flag{_suggestion(flag, '--')}")


def _suggestion(key: str, before: str = "") -> str:
    """ "; did you mean optim.learning_rate?", or nothing: the same name elsewhere, or a similar."""
    keys = list(_kinds())
    leaf = {k: k.rpartition(".")[2] for k in keys}
    wanted = key.rpartition(".")[2]
    found = [k for k in keys if leaf[k] == wanted]
    found = found or difflib.get_close_matches(key, keys, 1, cutoff=0.75)
    if not found:
        similar = difflib.get_close_matches(wanted, leaf.values(), 1)
        found = [k for k in keys if leaf[k] in similar]
    if not found:
        return " (--help lists them all)"
    return f"; did you mean {' or '.join(before + k for k in found[:3])}?"


def _build(flat: dict[str, Any]) -> Config:
    def section(cls: Any, prefix: str) -> Any:
        hints = typing.get_type_hints(cls)
        values = {}
        for f in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[f.name]):
                values[f.name] = section(hints[f.name], f"{prefix}{f.name}.")
            elif prefix + f.name in flat:
                values[f.name] = flat[prefix + f.name]
        return cls(**values)

    config = section(Config, "")
    assert isinstance(config, Config)
    return config


@functools.cache
def _sections() -> dict[str, str]:
    """Dotted names of the sections and what they are about."""
    found: dict[str, str] = {}

    def visit(cls: Any, prefix: str) -> None:
        for name, hint in typing.get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                about = inspect.cleandoc(hint.__doc__ or "").partition("\n")[0].rstrip(".")
                found[prefix + name] = f"{prefix}{name}: {about}"
                visit(hint, f"{prefix}{name}.")

    visit(Config, "")
    return found


@functools.cache
def _kinds() -> dict[str, _Kind]:
    """Every key, in order."""
    found: dict[str, _Kind] = {}

    def visit(cls: Any, prefix: str) -> None:
        hints, helps = typing.get_type_hints(cls), _attribute_docstrings(cls)
        defaults = flatten(cls())
        for f in dataclasses.fields(cls):
            hint, key = hints[f.name], prefix + f.name
            if dataclasses.is_dataclass(hint):
                visit(hint, f"{key}.")
                continue
            optional = isinstance(hint, types.UnionType)
            if optional:
                (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
            found[key] = _Kind(key, hint, optional, defaults[f.name], helps[f.name])

    visit(Config, "")
    return found


def _attribute_docstrings(cls: Callable[..., Any]) -> dict[str, str]:
    """The string below each field: Python keeps it in the source only."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(below, ast.Expr) and isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found
