"""What the sections of a config have in common: they are immutable, and know no other keys.

    class MeshConfig(Section):
        num_devices: int = option(8, "Devices of all processes.", "rounding", ge=1)

`options` and `schema` are made of them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jddp.config.mistakes import ConfigMistakes, describe_mistakes

Kwargs = dict[str, Any]
Effect = Literal["none", "result", "rounding", "numbers"]
Chosen = TypeVar("Chosen", bound="WordedSection")


def option(
    default: Any,
    description: str,
    effect: Effect = "numbers",
    *,
    alike: Sequence[str | None] = (),
    **rules: Any,
) -> Any:
    """Declares a key of a config.

    Args:
      default: Value where the key is not given.
      description: One line on its meaning.
      effect: What another value does to the numbers of a run. "none": all steps are bitwise the
        same. "result": so are all steps that both runs take, but one may take more of them, or be
        evaluated after others, so that its best evaluation is another. "rounding": they are the
        same up to rounding, but for random numbers, statistics and hooks of each replica,
        micro-batch or bucket. "numbers": steps, evaluations or the state kept as best are others,
        so it is another run.
      alike: Values of which one in the place of another has the effect "rounding" alone.
      **rules: Bounds of its values, as `pydantic.Field` takes them.
    """
    about: Any = {"effect": effect, "alike": list(alike)}
    return Field(default, description=description, json_schema_extra=about, **rules)


class Section(BaseModel):
    """A part of the config: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: object) -> object:
        """A section whose keys are all commented out reads as None."""
        return {} if values is None else values


class WithArguments(Section):
    """A part that is made with arguments."""

    kwargs: Kwargs = option({}, "Its arguments.")


class NamedSection(WithArguments):
    """A part that is chosen by a registered name or by the user's own target, never both."""

    name: str | None = option(None, "A registered name.")
    target: str | None = option(None, "Your own, as package.module:Name.")

    @model_validator(mode="before")
    @classmethod
    def _target_replaces_default_name(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("target") is not None:
            return {"name": None, **values}
        return values

    @model_validator(mode="after")
    def _one_of_both(self) -> "NamedSection":
        if (self.name is None) == (self.target is None):
            raise ValueError("give either 'name' or 'target'")
        return self


class WordedSection(Section):
    """A section for which a word can stand, in a config and in Python.

    Attributes:
      WORD: The key whose value the word is.
    """

    WORD: ClassVar[str] = "name"

    @classmethod
    def of_word(cls, word: object) -> dict[str, object]:
        """Returns the values for which the word stands, by key."""
        return {cls.WORD: word}

    @model_validator(mode="before")
    @classmethod
    def _word_is_spelled_out(cls, values: object) -> object:
        return cls.of_word(values) if isinstance(values, str) else values

    @classmethod
    def chosen(cls: type[Chosen], given: object, option: str) -> Chosen:
        """Returns the section that a user of Python has given, or that a word stands for.

        Args:
          given: A word, a section, or None for the defaults.
          option: Name of the option, for the error.

        Raises:
          ConfigError: If it is neither, with the words that there are.
        """
        if isinstance(given, cls):
            return given
        with _one_line_each(cls, f"{option}={given!r}"):
            return cls(**({} if given is None else cls.of_word(given)))


class ObjectSection(Section):
    """A section that users of Python make, whose mistakes are one line each."""

    if not TYPE_CHECKING:  # Type checkers make the signature from the fields.

        def __init__(self, **values):
            with _one_line_each(type(self), f"jddp.{type(self).__name__}"):
                super().__init__(**values)


@contextlib.contextmanager
def _one_line_each(schema: type[Section], called: str) -> Iterator[None]:
    """Describes the mistakes of a section in the words of a config, each after what was called."""
    try:
        yield
    except ValidationError as error:
        mistakes = describe_mistakes(error, schema)
        lines = [x._replace(text=f"{called}: {x.text}") for x in mistakes]
        raise ConfigMistakes(lines) from None
