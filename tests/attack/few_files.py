"""A collector that may open only so many files.

python -m tests.attack.few_files COUNT collect --root DIR --port PORT
"""

from __future__ import annotations

import resource
import sys

from tests.plain_collector.__main__ import main

if __name__ == "__main__":
    count = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    sys.exit(main(sys.argv[2:]))
