"""A process that writes trials and Optuna's side of them: `URL STUDY FIRST COUNT`."""

from __future__ import annotations

import sys

import optuna

from tests.tuner import examples
from tuner.store import Store


def main(url: str, study: str, first: int, count: int) -> None:
    """Save trials and say each one's number once it is saved."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with Store.open(url) as store:
        told = optuna.load_study(study_name=study, storage=store.optuna_storage())
        for number in range(first, first + count):
            told.tell(told.ask(), 1.0)
            store.save_trial(study, number, examples.result(capacity_rps=float(number)))
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
