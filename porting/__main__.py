"""``python -m porting``: the command line."""

from porting.cli import main

if __name__ == "__main__":
    main()
