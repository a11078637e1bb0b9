"""`python -m tuner` is `tuner`."""

from tuner.cli import main

main()
