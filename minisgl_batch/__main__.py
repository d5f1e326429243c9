"""`python -m minisgl_batch` is the `minisgl-batch` command."""

from minisgl_batch.cli.main import main

if __name__ == "__main__":
    main()
