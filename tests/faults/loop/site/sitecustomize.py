"""Python runs this at the start of every process that has this folder in its PYTHONPATH.

It plants a broken build or the witness in grandchild processes: `headrace up` starts a collector
and a trainer, and the collector starts its shard writer.
"""

import os
import sys

_BROKEN = {"collect", "up", "train", "publish", "rollback", "write-shards"}

_WANTED = {"FAULTS_MUTANT", "FAULTS_WITNESS"}

if _BROKEN & set(sys.orig_argv) and _WANTED & set(os.environ):
    from tests.faults.loop import process_environment

    process_environment.begin(sys.orig_argv)
