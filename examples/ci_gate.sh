#!/bin/sh
# A gate for a pipeline: record a program, fail when a launch queue was full or a submission took too long.
#
#     sh examples/ci_gate.sh python my_benchmark.py
#
# The exit code is 0 when all limits hold, 1 when one is broken or the recording says too little to tell.
set -eu
kvprobe run --output recording -- "$@"
kvprobe check recording --no saturation --no pageable --max-call 50ms --junit kvprobe-junit.xml
