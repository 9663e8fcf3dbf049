"""`python -m snnpart` is the same as `snnpart`."""

from snnpart.cli import main

if __name__ == "__main__":
    main()
