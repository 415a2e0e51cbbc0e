"""The entry point of `python -m fedsweep.cli`."""

from fedsweep.cli import main

if __name__ == "__main__":
    main()
