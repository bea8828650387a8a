"""``python -m entrain_bench.figures [name ...]``."""

import sys

from entrain_bench.figures._cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
