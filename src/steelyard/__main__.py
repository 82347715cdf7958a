"""`python -m steelyard` is the `steelyard` command."""

from steelyard.cli import main

if __name__ == "__main__":
    main()
