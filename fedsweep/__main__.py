"""The entry point of `fedsweep` and of `python -m fedsweep`."""


def main() -> None:
    """Run the command line. Ctrl-C ends the command with the exit code 130, also while its modules are imported."""
    try:
        from fedsweep.cli import main as command
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
