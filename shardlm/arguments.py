"""The command line and the YAML files: text in, `Config` and a command's own options out.

`shardlm.config` defines the keys; this module only reads them. A flag and a line of YAML go
through the same reader, so `1e-4` is a number and `false` is false in both. Whatever cannot be
used is a `ConfigError` with one readable message, which `parse_config` and `parse_options` turn
into exit status 2.
"""

import argparse
import contextlib
import dataclasses
import difflib
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jsonargparse
import yaml

from shardlm.config import Config, ConfigError, flatten
from shardlm.keys import UNREADABLE, Kind, Loader, kinds, plain, sections
from shardlm.validation import validate

T = TypeVar("T")


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
      The configuration, checked by `shardlm.validation.validate`.

    Raises:
      SystemExit: status 2 after one message on standard error, for any mistake.
    """
    parser = _parser(prog, "[--config FILE.yaml] [--KEY VALUE]...", description)
    _add_files(parser)
    parser.add_argument(
        "--print_config", action="store_true", help="Print the resolved configuration and exit."
    )
    _add_keys(parser, kinds())
    argv = sys.argv[1:] if argv is None else list(argv)
    with _one_message(prog):
        _check_flags(argv, kinds(), ("config", "print_config"))
        values = parser.parse_args(argv)
        config = _build({key: values[key] for key in kinds()})
        validate(config)
    if values["print_config"]:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def parse_options(
    options: type[T],
    keys: Sequence[str],
    argv: Sequence[str] | None = None,
    prog: str = "shardlm",
    description: str = "",
    files: bool = False,
    kept: Sequence[str] = (),
) -> tuple[T, dict[str, Any]]:
    """Read a command's own flags, and some of the configuration's.

    Args:
      options: a dataclass. A field without default is an argument that stands without a flag; a
        tuple (of text) is a flag that may be given several times.
      keys: configuration keys that are flags too; one that ends in a dot is a section.
      argv, prog, description: as for `parse_config`.
      files: take `--config FILE.yaml` too, with any keys.
      kept: configuration keys that are flags too, and keep the value of a run where not given.

    Returns:
      The options, and the configuration keys with their values (defaults, where not given), for
      `override`; with `files`, all of them; those of `kept` only where given.

    Raises:
      SystemExit: status 2 after one message on standard error, for any mistake.
    """
    cls: Any = options
    own = kinds(cls)
    taken = {
        name: kind
        for name, kind in kinds().items()
        if name in keys or any(name.startswith(key) for key in keys if key.endswith("."))
    }
    words = [key.upper() for key, kind in own.items() if kind.default is dataclasses.MISSING]
    parser = _parser(prog, " ".join([*words, "[--KEY VALUE]..."]), description)
    for key, kind in own.items():
        needed = kind.default is dataclasses.MISSING
        parser.add_argument(
            key if needed else f"--{key}",
            **({} if needed else {"default": kind.default}),
            metavar=kind.metavar,
            help=_help(kind, "" if needed else plain(kind.default)),
            action=_OptionAction,
            kind=kind,
        )
    _add_keys(parser, taken)
    of_run = {key: kinds()[key] for key in kept}
    _add_keys(parser, of_run, of_run=True)
    if files:
        _add_files(parser)
        # Known, so that a file may have them; as flags they are refused.
        for key, kind in kinds().items():
            if key not in taken:
                parser.add_argument(f"--{key}", default=kind.default, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else list(argv)
    with _one_message(prog):
        _check_flags(argv, own | taken | of_run, ("config",) if files else ())
        values = parser.parse_args(argv)
        found = _section(cls, {key: values[key] for key in own})
    given = [key for key in kept if key in values]
    return found, {key: values[key] for key in (*(kinds() if files else taken), *given)}


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values at some dotted keys."""
    return _build(flatten(config) | dict(values))


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
        The values are not checked against each other (`shardlm.validation.validate`).
    """
    return _build(_read(text, name))


def difference(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, as (key, value in `a`, value in `b`), in order."""
    other = flatten(b)
    return [(key, old, other[key]) for key, old in flatten(a).items() if old != other[key]]


def _parser(prog: str, usage: str, description: str) -> jsonargparse.ArgumentParser:
    return jsonargparse.ArgumentParser(
        prog=prog,
        description=description,
        usage=f"%(prog)s {usage}",
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
        print_config=None,
    )


def _add_files(parser: jsonargparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action=_ConfigAction,
        default=argparse.SUPPRESS,
        metavar="FILE.yaml",
        help="Read keys from a file; flags and files that come later win.",
    )


def _add_keys(
    parser: jsonargparse.ArgumentParser, keys: Mapping[str, Kind], of_run: bool = False
) -> None:
    """Flags for configuration keys, in a group for each section; `of_run`: without defaults."""
    groups: dict[str, Any] = {}
    for key, kind in keys.items():
        section = key.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(sections()[section])
        groups[section].add_argument(
            f"--{key}",
            default=argparse.SUPPRESS if of_run else kind.default,
            metavar=kind.metavar,
            help=_help(kind, "that of the run" if of_run else plain(kind.default)),
            action=_KeyAction,
            nargs="+" if kind.many else None,
        )


def _help(kind: Kind, default: str) -> str:
    default = f"; default: {default}" if default else ""
    return f"{kind.help} (type: {kind.name}{default})".replace("%", "%%")


@contextlib.contextmanager
def _one_message(prog: str) -> Iterator[None]:
    """Turn a mistake into a line on standard error and exit status 2."""
    try:
        yield
    except (argparse.ArgumentError, ConfigError) as error:
        message = str(error).removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            message += " (write --KEY VALUE; --help lists the keys)"
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            # The library names them as it stores them, and not as the usage line does.
            message = f"{missing.upper()} is missing (--help says what it is)"
        sys.stderr.write(f"{prog}: {message}\n")
        raise SystemExit(2) from None


class _ConfigAction(argparse.Action):
    """Puts the keys of a file into the namespace, where later flags overwrite them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        for key, value in _read_file(values).items():
            namespace[key] = value


class _KeyAction(argparse.Action):
    """Puts the value of a configuration key's flag into the namespace."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace[self.dest] = kinds()[self.dest].from_flag(values)


class _OptionAction(argparse.Action):
    """Puts the value of a command's own flag into the namespace; a tuple grows each time."""

    def __init__(self, *args: Any, kind: Kind, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind = kind

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.kind.many:
            namespace[self.dest] = (*namespace[self.dest], *self.kind.convert([values]))
        else:
            namespace[self.dest] = self.kind.from_flag(values)


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
        loader = Loader(text)
        root = loader.get_single_node()
        seen: dict[str, tuple[int, Any]] = {}
        if root is not None:
            _walk(root, "", name, loader, seen)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name}: not valid YAML: {reason}") from None
    return {key: value for key, (_, value) in seen.items()}


def _walk(node: Any, prefix: str, name: str, loader: Any, seen: dict[str, tuple[int, Any]]) -> None:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        if prefix and node.tag == "tag:yaml.org,2002:null":
            return
        what = f"{prefix.rstrip('.')} is a section" if prefix else "a configuration has sections"
        example = next(key for key in kinds() if key.startswith(prefix))
        raise ConfigError(f"{name}:{line}: {what}: write keys below it, as in {example}: VALUE")
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value if isinstance(key_node, yaml.ScalarNode) else '?'}"
        line = key_node.start_mark.line + 1
        if key in sections():
            _walk(value_node, f"{key}.", name, loader, seen)
            continue
        if key not in kinds():
            raise ConfigError(f"{name}:{line}: {key} is not a key{_suggestion(key, kinds())}")
        if key in seen:
            raise ConfigError(f"{name}:{line}: {key} is given twice (also line {seen[key][0]})")
        try:
            value = kinds()[key].convert(loader.construct_object(value_node, deep=True))
        except ConfigError as error:
            raise ConfigError(f"{name}:{line}: {error}") from None
        seen[key] = (line, value)


def _check_flags(argv: Iterable[str], keys: Mapping[str, Kind], also: Sequence[str] = ()) -> None:
    """Refuse flags that do not exist with the key that was probably meant."""
    for word in argv:
        flag, _, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag in (*also, "help"):
            continue
        example = next((key for key in keys if key.startswith(f"{flag}.")), None)
        if example:
            raise ConfigError(f"--{flag} is a section: set its keys, as in --{example} VALUE")
        if flag not in keys:
            raise ConfigError(f"--{flag} is not a flag{_suggestion(flag, keys, '--')}")


def _suggestion(key: str, keys: Iterable[str], before: str = "") -> str:
    """ "; did you mean optim.learning_rate?", or nothing: the same name elsewhere, or a similar."""
    leaf = {k: k.rpartition(".")[2] for k in keys}
    wanted = key.rpartition(".")[2]
    found = [k for k in leaf if leaf[k] == wanted]
    found = found or difflib.get_close_matches(key, leaf, 1, cutoff=0.75)
    if not found:
        similar = difflib.get_close_matches(wanted, leaf.values(), 1)
        found = [k for k in leaf if leaf[k] in similar]
    if not found:
        return " (--help lists them all)"
    return f"; did you mean {' or '.join(before + k for k in found[:3])}?"


def _build(flat: Mapping[str, Any]) -> Config:
    config = _section(Config, flat)
    assert isinstance(config, Config)
    return config


def _section(cls: Any, flat: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass, and those in it, from dotted keys."""
    hints = typing.get_type_hints(cls)
    values = {}
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = _section(hints[f.name], flat, f"{prefix}{f.name}.")
        elif prefix + f.name in flat:
            values[f.name] = flat[prefix + f.name]
    return cls(**values)
