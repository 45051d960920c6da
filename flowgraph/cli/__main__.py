"""`python -m flowgraph.cli` is `flowgraph`."""

from flowgraph.cli import main

if __name__ == "__main__":
    main()
