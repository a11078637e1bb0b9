"""Which requests can still make their deadline: an estimate from what the last ones took.

Pure: the caller brings the counts and the times.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the newest measurement in a moving average.
RECENT_WEIGHT = 0.1
# A request is taken if its estimate fits into this share of its time: queues vary, and an answer
# that comes late has cost the same as one in time.
SAFE_SHARE = 0.8


@dataclass
class Pace:
    """Moving averages of what a picture costs.

    Args:
        preprocess_s: of one worker for one picture.
        batch_s: of one batch.
        picture_s: of the device for one picture in a batch.
    """

    preprocess_s: float = 0.0
    batch_s: float = 0.0
    picture_s: float = 0.0

    def preprocessed(self, took_s: float) -> None:
        self.preprocess_s = _toward(self.preprocess_s, took_s)

    def batch_done(self, size: int, took_s: float) -> None:
        self.batch_s = _toward(self.batch_s, took_s)
        self.picture_s = _toward(self.picture_s, took_s / size)

    def answer_in_s(self, decoding: int, waiting: int, workers: int, places: int) -> float:
        """Seconds until a picture that arrives now is answered.

        The slower of the two stages makes it wait for everybody ahead; its own decoding, the batch
        at work and its own batch follow.

        Args:
            decoding: pictures admitted and not yet decoded.
            waiting: pictures admitted and not yet dispatched, the ones above included.
        """
        decode_s = decoding * self.preprocess_s / workers
        queue_s = waiting * self.picture_s / places
        return max(decode_s, queue_s) + self.preprocess_s + self.batch_s

    def makes_it(self, left_s: float, answer_in_s: float) -> bool:
        """Whether a new request with this much time left should be taken."""
        return answer_in_s <= SAFE_SHARE * left_s


def _toward(average_s: float, newest_s: float) -> float:
    return average_s + RECENT_WEIGHT * (newest_s - average_s) if average_s else newest_s
