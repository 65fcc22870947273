"""`python -m fivefold` is the command `fivefold`."""

from fivefold.cli import main

if __name__ == "__main__":
    main()
