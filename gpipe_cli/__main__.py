"""`python -m gpipe_cli` is `gpipe`."""

from gpipe_cli.cli import entry

if __name__ == "__main__":
    entry()
