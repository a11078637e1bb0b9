"""Study files: the flags of `tuner run`, written down."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tuner.data import closest, load_yaml, plain, resolve, where
from tuner.errors import UsageError


class StudyFile(BaseModel):
    """What a study file may say. Values mean what they mean as flags, and are checked there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    p99_budget: str | None = None
    qps: float | None = None
    model: str | None = None
    weights: str | None = None
    payloads: str | None = None
    space: str | None = None
    objective: str | None = None
    min_agreement: float | None = None
    trials: int | None = None
    time_budget: str | None = None
    device: str | None = None
    server: str | None = None
    storage: str | None = None
    seed: int | None = None
    search: str | None = None
    study_name: str | None = None

    @classmethod
    def load(cls, name: str) -> dict[str, Any]:
        """The values that the file gives, by option name.

        Raises:
            UsageError: not a study file; the message names file and line.
        """
        source = resolve("studies", "--study", name)
        document = load_yaml(source)
        try:
            return cls.model_validate(plain(document)).model_dump(exclude_none=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            place = where(source, document, key)
            if first["type"] == "extra_forbidden":
                raise UsageError(
                    f"{place}: {key} is not a setting of a study.",
                    hint=closest(key, list(cls.model_fields)),
                ) from error
            raise UsageError(
                f"{place}: {key}: {first['msg'].lower()}, given {first['input']!r}.",
                hint=f"See the flag --{key.replace('_', '-')} in tuner run --help.",
            ) from error
