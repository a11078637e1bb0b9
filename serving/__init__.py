"""The reference inference server: front end, preprocessing, batcher, engines, statistics."""

__version__ = "0.1.0"
