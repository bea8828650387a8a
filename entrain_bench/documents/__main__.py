"""``python -m entrain_bench.documents``."""

import sys

from entrain_bench.documents.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
