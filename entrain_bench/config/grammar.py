"""The grammar of the command line: ``entrain-bench [verb] key=value ...``, one parser for all verbs."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, either, similar, unknown_key
from entrain_bench.config.adapter_file import with_adapter
from entrain_bench.config.given import DATA, with_data
from entrain_bench.config.line import CONFIG_DIR, HELP, MULTIRUN, RUN, VERSION, Line, choice_hint
from entrain_bench.config.overrides import error_line, parse
from entrain_bench.config.schema import NESTED, ConfigSchema, check_storage
from entrain_bench.specs.parse import parse as parse_values

# Top-level keys of a run, and those that traces, plans and Hydra add to them.
RUN_KEYS = (*ConfigSchema.__dataclass_fields__, DATA, "plan", "hydra")
NESTED_KEYS = {group: [*config.__dataclass_fields__] for group, config in NESTED.items()}
TOP = re.compile(r"[+~]*([A-Za-z_]\w*)")


def own(default: Any, meaning: str = "") -> Any:
    """A field of a verb's keys; ``meaning``: a line for ``--help``, empty for a key that ``config.yaml`` explains."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class NoKeys:
    """The keys of a verb that has none of its own."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The key of a verb that reads a folder of results."""

    results_dir: str = own("results")


@dataclass(frozen=True, slots=True)
class Storage(Folder):
    """The keys that say where results go and which runs are repeated; those of every run."""

    mlflow: bool = own(True)
    mlflow_uri: str | None = own(None)
    retry: str | None = own(None)

    def __post_init__(self) -> None:
        check_storage(self.mlflow_uri, self.retry)


@dataclass(frozen=True, slots=True)
class Verb[K]:
    """The keys, words and options of a verb."""

    keys: type[K]  # a frozen dataclass of its own keys (``own``)
    passed: Collection[str] = ()  # top-level keys of a configuration, whose overrides it composes itself
    words: str = ""  # meaning of words without ``=``, for its help; empty if it takes none
    options: Collection[str] = (CONFIG_DIR,)
    examples: Sequence[str] = ()  # command lines without ``entrain-bench``
    more: Callable[[str | None], str] | None = None  # further text of its help, given the user's folder

    @property
    def fields(self) -> tuple[Field[Any], ...]:
        """The verb's own keys."""
        return fields(self.keys)  # type: ignore[arg-type]

    @property
    def known(self) -> list[str]:
        """All keys that it takes."""
        return [*(one.name for one in self.fields), *self.passed]


@dataclass(frozen=True, slots=True)
class Request[K]:
    """A command line of a verb: values of its own keys, and the rest as in ``Line``."""

    keys: K
    words: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    hydra: tuple[str, ...] = ()

    @property
    def config_dir(self) -> str | None:
        """The folder of the user's, if any."""
        return self.options.get(CONFIG_DIR)

    @property
    def multirun(self) -> bool:
        """Whether it is a sweep."""
        return MULTIRUN in self.options


def read[K](line: Line, name: str, verb: Verb[K]) -> Request[K]:
    """Parse a command line of a verb; ``UserError`` for unknown options, keys and words, and values that do not fit."""
    for text in line.unknown:
        raise UserError(_no_option(text, verb))
    for option in (*line.options, *(line.hydra[:1] if name != RUN else ())):
        if option not in (HELP, *verb.options):
            raise UserError(f"{option}: {name} does not take it; leave it out")
    if line.words and not verb.words:
        raise UserError(f"{line.words[0]}: must be KEY=VALUE{choice_hint(line.words[0])}")
    mine = {one.name for one in verb.fields}
    texts: list[str] = []
    for text in line.overrides:
        top = TOP.match(text)
        if top and top[1] not in verb.known:
            # The key of a run that ends so: ``layout.tp`` for ``tp``.
            last = top[1].lower()
            nested = (f"{group}.{last}" for group in verb.passed if last in NESTED_KEYS.get(group, ()))
            raise unknown_key(text, verb.known, next(nested, ""))
        if top and top[1] in mine:
            texts.append(text)
    overrides = tuple(text for text in line.overrides if text not in texts)
    return Request(
        _values(name, verb.keys, texts), line.words, with_adapter(with_data(overrides)), line.options, line.hydra
    )


def _values[K](verb: str, keys: type[K], texts: Sequence[str]) -> K:
    node = OmegaConf.structured(keys)
    # A frozen dataclass would take no value.
    OmegaConf.set_readonly(node, False)
    given: set[str] = set()
    for text in texts:
        name = text.partition("=")[0]
        override = parse(text)
        if override.key_or_group != name or override.is_sweep_override():
            raise UserError(f"{text}: must be {override.key_or_group}=VALUE, with one value")
        if name in given:
            raise UserError(f"{text}: {name} must be given once")
        given.add(name)
        try:
            OmegaConf.update(node, name, override.value())
        except OmegaConfBaseException as error:
            raise UserError(error_line(error, text)) from error
    try:
        values = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(error_line(error, " ".join(texts))) from error
    return parse_values(keys, values, verb)


def _no_option(text: str, verb: Verb[Any]) -> str:
    option, _, value = text.partition("=")
    name = option.lstrip("-").replace("-", "_")
    if name in verb.known:
        return f"{option}: is a key. Write {name}={value or 'VALUE'}"
    allowed = [HELP, VERSION, *verb.options]
    near = similar(option, allowed)
    return f"{option}: unknown option" + (
        f". Did you mean {either(near)}?" if near else f"; choices: {', '.join(allowed)}"
    )
