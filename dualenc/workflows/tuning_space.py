"""The settings that a tuning tries: ranges and choices, given or by the kind of model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dualenc.errors import DualencError
from dualenc.recipe.resolve import Recipe, changed, make_recipe, plain_value

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("dualenc.workflows")

RATE = "trainer.learning_rate"
BATCH = "trainer.batch_size"
TEMPERATURE = "objective.temperature"
OBJECTIVE = "objective"
"""Chooses classes by name; a + stands for positive_in_softmax=true."""
PLUS = "objective.positive_in_softmax"
SHARED = ("data", "evaluator")
"""Sections without settings to try: what is compared has to be the same for all trials."""
EXAMPLE = "write section.key=1e-5..5e-4 or section.key=0.02,0.05"
Values = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, uniform in their logarithm; whole numbers if both ends are.

    Range(1e-5, 5e-4)
    """

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"

    def __contains__(self, value: object) -> bool:
        return _is_number(value) and self.low <= value <= self.high  # type: ignore[operator]

    def suggest(self, trial: optuna.Trial, name: str) -> float:
        """Return a value for a trial, with three digits, which say all that a tuning can tell."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=True)
        return float(f"{trial.suggest_float(name, self.low, self.high, log=True):.3g}")


@dataclass(frozen=True)
class Choice:
    """One of several values.

    Choice((0.02, 0.05, 0.1))
    """

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.values))

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Return a value for a trial."""
        return trial.suggest_categorical(name, self.values)


Space = Mapping[str, Range | Choice]

ADAPTERS = 10
"""Factor of the learning rate of adapters (LoRA) to that of all weights."""
BY_KIND: Mapping[str, Space] = {
    "a published text encoder": {
        RATE: Range(1e-5, 5e-4),
        TEMPERATURE: Range(0.01, 0.1),
        OBJECTIVE: Choice(("SogCLR+", "InfoNCE", "GlobalCache+")),
        BATCH: Choice((32, 128)),
    },
    "a text encoder from scratch": {
        RATE: Range(2e-4, 1e-2),
        TEMPERATURE: Range(0.02, 0.1),
        OBJECTIVE: Choice(("GlobalCache", "InfoNCE", "MomentumQueue")),
        BATCH: Choice((32, 128)),
    },
    "static embeddings": {
        RATE: Range(2e-3, 1e-1),
        TEMPERATURE: Range(0.02, 0.1),
        OBJECTIVE: Choice(("SogCLR+", "InfoNCE", "GlobalCache")),
        BATCH: Choice((128, 512, 2048)),
    },
    "an adapter of vectors": {
        RATE: Range(2e-4, 2e-2),
        TEMPERATURE: Range(0.02, 0.1),
        OBJECTIVE: Choice(("GlobalCache", "InfoNCE", "SogCLR+")),
        BATCH: Choice((32, 128, 512)),
    },
    "a published image–text model": {
        RATE: Range(1e-6, 1e-4),
        TEMPERATURE: Range(0.005, 0.1),
        OBJECTIVE: Choice(("SogCLR+", "InfoNCE", "ISIR")),
    },
    "an image–text model from scratch": {
        RATE: Range(1e-4, 5e-3),
        TEMPERATURE: Range(0.01, 0.1),
        OBJECTIVE: Choice(("SogCLR+", "InfoNCE", "ISIR")),
    },
    "an image encoder": {
        TEMPERATURE: Range(0.05, 0.5),
        OBJECTIVE: Choice(("SogCLR", "InfoNCE", "ISIR")),
    },
    "another model": {TEMPERATURE: Range(0.01, 0.2)},
}
"""docs/which-objective.md as ranges, of learning rates for Adam. Without a rate: around the
recipe's."""
_CACHED_KINDS = ("a published text encoder", "a text encoder from scratch")
"""Kinds whose larger batches are encoded in chunks of the recipe's batch, to keep its memory."""


def kind_of(recipe: Recipe) -> str:
    """Return the kind of a recipe's model, a key of `BY_KIND`."""
    model = recipe.settings["model"]
    name, given = model["class_path"].rpartition(".")[2], model["init_args"]
    if name == "TextEncoder":
        return _CACHED_KINDS[given.get("name") is None]
    if name == "ImageTextEncoder":
        is_new = given.get("config") is not None
        return "an image–text model from scratch" if is_new else "a published image–text model"
    names = {
        "StaticEncoder": "static embeddings",
        "VectorEncoder": "an adapter of vectors",
        "ImageEncoder": "an image encoder",
    }
    return names.get(name, "another model")


def default_space(recipe: Recipe) -> Space:
    """Return the settings to try for the kind of a recipe's model, with the recipe's own values.

    Args:
        recipe: recipe to tune.
    """
    space = dict(BY_KIND[kind_of(recipe)])
    trainer = recipe.settings["trainer"]
    rate = trainer["learning_rate"]
    if RATE not in space or trainer["optimizer"] != "adamw":
        space[RATE] = Range(rate / 10, rate * 10)
    elif recipe.settings["model"]["init_args"].get("lora_rank"):
        own = BY_KIND[kind_of(recipe)][RATE]
        space[RATE] = Range(own.low * ADAPTERS, own.high * ADAPTERS)  # type: ignore[union-attr]
    if "temperature" not in recipe.settings["objective"]["init_args"]:
        # A wrapper, such as Matryoshka, holds the objective inside.
        for name in (TEMPERATURE, OBJECTIVE):
            space.pop(name, None)
    if recipe.settings["batching"] is not None:
        # Its batches are what the recipe is about, and not all objectives take them.
        for name in (BATCH, OBJECTIVE):
            space.pop(name, None)
    for name, tried in space.items():
        if isinstance(tried, Choice) and (own := own_value(recipe, name)) not in tried:
            space[name] = Choice((own, *tried.values))
    order = (RATE, TEMPERATURE, OBJECTIVE, BATCH)
    return {name: space[name] for name in order if name in space}


def without_large_batches(space: Space, pairs: int) -> Space:
    """Return a space without batches of more pairs than there are, and say so.

    Args:
        space: settings to try.
        pairs: number of pairs to train on.
    """
    tried = space.get(BATCH)
    if not isinstance(tried, Choice) or max(tried.values) <= pairs:
        return space
    small = Choice(tuple(size for size in tried.values if size <= pairs))
    logger.info("%s=%s: the data has only %s pairs", BATCH, small, f"{pairs:,}")
    return {**space, BATCH: small}


def parse_space(settings: Sequence[str], recipe: Recipe) -> Space:
    """Return the settings to try that a user has given.

        parse_space(["trainer.learning_rate=1e-5..5e-4", "objective=SogCLR+,InfoNCE"], recipe)

    Args:
        settings: each `section.key=low..high` or `section.key=value,value`; `objective` chooses
            classes.
        recipe: recipe to tune, whose own value joins the choices.

    Raises:
        DualencError: an entry is none of these, or is given twice.
    """
    space: dict[str, Range | Choice] = {}
    for entry in settings:
        name, separator, text = entry.partition("=")
        if not separator or not text or not all(name.split(".")):
            raise DualencError(f"--set {entry!r} is not a setting with values", fix=EXAMPLE)
        if name in space:
            raise DualencError(f"--set names {name} twice", fix="give all its values at once")
        # Options after --set are read as settings to try, so this is an override out of place.
        if name.split(".")[0] in SHARED:
            raise DualencError(
                f"--set {entry!r}: all trials have the same {name.split('.')[0]}",
                fix="write it before --set",
            )
        name = OBJECTIVE if name == "objective.class_path" else name
        tried = _range(entry, text) if ".." in text else _choice(text)
        if isinstance(tried, Choice) and (own := own_value(recipe, name)) not in tried:
            tried = Choice((own, *tried.values))
        space[name] = tried
    return space


def _range(entry: str, text: str) -> Range:
    ends = [plain_value(end) for end in text.split("..")]
    if len(ends) != 2 or not all(map(_is_number, ends)) or not 0 < ends[0] < ends[1]:
        raise DualencError(f"--set {entry!r} is not a range 0 < low..high", fix=EXAMPLE)
    return Range(*ends)


def _choice(text: str) -> Choice:
    return Choice(tuple(dict.fromkeys(plain_value(part.strip()) for part in text.split(","))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def own_value(recipe: Recipe, name: str) -> Any:
    """Return the recipe's value of a setting; of `objective`, the name with its +."""
    section, *keys = name.split(".")
    value = recipe.settings[section]
    if name == OBJECTIVE:
        plus = "+" if (value.get("init_args") or {}).get("positive_in_softmax") else ""
        return value["class_path"].rpartition(".")[2] + plus
    if section != "trainer" and keys[0] not in ("class_path", "init_args"):
        keys.insert(0, "init_args")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def own_values(recipe: Recipe, space: Space) -> Values:
    """Return the recipe's values of all settings of a space."""
    return {name: own_value(recipe, name) for name in space}


def with_values(
    recipe: Recipe, values: Values, overrides: Sequence[str] = (), modules: Sequence[str] = ()
) -> Recipe:
    """Return a recipe with other values of some settings.

    Args:
        recipe: recipe to change.
        values: value by name of the setting.
        overrides: further overrides, as of `read_recipe`.
        modules: modules other than dualenc whose classes the recipe may name.

    Raises:
        DualencError: a value does not fit.
    """
    new = {name: value for name, value in values.items() if value != own_value(recipe, name)}
    # The objective first: it carries the temperature over, which an entry of its own replaces.
    words = _objective(recipe, new.pop(OBJECTIVE)) if OBJECTIVE in new else []
    words += [f"{name}={_text(value)}" for name, value in new.items()]
    trainer = recipe.settings["trainer"]
    small, size = trainer["batch_size"], values.get(BATCH)
    is_larger = isinstance(size, int) and size > small and kind_of(recipe) in _CACHED_KINDS
    if is_larger and trainer["chunk_size"] is None:
        words.append(f"trainer.chunk_size={small}")
    last = {word.partition("=")[0]: word for word in words}
    settings = changed(recipe.settings, [*last.values(), *overrides])
    return make_recipe(settings, recipe.source, modules)


def _objective(recipe: Recipe, name: str) -> list[str]:
    """Return the overrides that choose an objective by its name, such as "SogCLR+"."""
    own = recipe.settings["objective"]
    plus = "true" if name.endswith("+") else "false"
    name = name.removesuffix("+")
    if name == own["class_path"].rpartition(".")[2]:
        return [f"{PLUS}={plus}"]
    words = [f"objective.class_path={name}"]
    if plus == "true":
        words.append(f"{PLUS}=true")
        # The γ that docs/which-objective.md recommends and eval/ measured.
        words += ["objective.gamma=0.5"] if name == "SogCLR" else []
    if "temperature" in own["init_args"]:
        words.append(f"{TEMPERATURE}={_text(own['init_args']['temperature'])}")
    return words


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def check_space(recipe: Recipe, space: Space, modules: Sequence[str] = ()) -> None:
    """Raise if a value of a space does not fit the recipe, before anything is trained.

    Args:
        recipe: recipe to tune.
        space: settings to try.
        modules: see `with_values`.

    Raises:
        DualencError: names the setting.
    """
    fit = partial(with_values, recipe, modules=modules)
    objectives = space[OBJECTIVE].values if OBJECTIVE in space else ()  # type: ignore[union-attr]
    for name, tried in space.items():
        for value in (tried.low, tried.high) if isinstance(tried, Range) else tried.values:
            fit({name: value})
            # A setting of one objective is none of another.
            for objective in objectives if name.startswith("objective.") else ():
                fit({OBJECTIVE: objective, name: value})
