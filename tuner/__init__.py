"""Finds the serving configuration that gets the most useful work out of a device inside a P99."""

__version__ = "0.1.0"
