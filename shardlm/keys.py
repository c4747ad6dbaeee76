"""The keys of a configuration and the flags of a command: types, defaults, help, and their text.

Read off the dataclasses that define them, so that nothing is written twice.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from typing import Any, Literal, NoReturn

import yaml

from shardlm.config import Config, ConfigError


@dataclasses.dataclass(frozen=True)
class Kind:
    """A key or flag: how its text is read, and what help says about it."""

    key: str
    type: Any
    """The annotation without the `| None`."""
    optional: bool
    default: Any
    """`dataclasses.MISSING` where there is none."""
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
                return self.convert(scalar(text[0]))
            return self.convert([t if self.item is str else scalar(t) for t in text])
        return self.convert(text if self.item is str or self.choices else scalar(text))

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
            if number and abs(value) <= sys.float_info.max:
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
        shown = repr(value) if isinstance(value, str) else plain(value)
        raise ConfigError(f"{self.key} is {shown}: it must be {wanted}{also}")


def plain(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        text = str(value)
        return text if text.isprintable() else repr(text)
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


class Loader(yaml.SafeLoader):
    """YAML 1.1, but `1e-4` is a number, as in YAML 1.2, and dates are text."""


Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if not tag.endswith(("float", "timestamp"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


UNREADABLE = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
"""What PyYAML raises: also for numbers of thousands of digits, and for tags that do not fit."""


def scalar(text: str) -> Any:
    """A flag's text as YAML; what is not YAML is text."""
    try:
        return yaml.load(text, Loader=Loader)
    except UNREADABLE:
        return text


@functools.cache
def sections() -> dict[str, str]:
    """Dotted names of the configuration's sections and what they are about."""
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
def kinds(cls: Any = Config, prefix: str = "") -> dict[str, Kind]:
    """Every key of a dataclass and of those in it, by dotted name, in order."""
    found: dict[str, Kind] = {}
    hints, helps = typing.get_type_hints(cls), _attribute_docstrings(cls)
    for f in dataclasses.fields(cls):
        hint, key = hints[f.name], prefix + f.name
        if dataclasses.is_dataclass(hint):
            found |= kinds(typing.cast(Any, hint), f"{key}.")
            continue
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        found[key] = Kind(key, hint, optional, f.default, helps[f.name])
    return found


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """The string below each field, inherited ones too: Python keeps it in the source only."""
    found: dict[str, str] = {}
    for base in cls.__mro__[:-1]:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(below, ast.Expr) and isinstance(field, ast.AnnAssign):
                assert isinstance(field.target, ast.Name)
                found.setdefault(field.target.id, " ".join(ast.literal_eval(below.value).split()))
    return found
