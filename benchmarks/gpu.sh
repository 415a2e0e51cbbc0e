#!/usr/bin/env bash
# Measure fedsweep on this machine's GPU, in about five minutes, and write the results to a JSON file:
#
#   bash benchmarks/gpu.sh benchmarks/results/NAME.json
#
# The three parts are described in benchmarks/gpu/__main__.py. If one of them fails, the others still run. PYTHON sets
# the command that starts Python; the default is `uv run python`.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: bash benchmarks/gpu.sh FILE.json [OPTION...]}
failed=0
for part in agreement throughput sharing; do
    # PYTHON may consist of several words.
    # shellcheck disable=SC2086
    ${PYTHON:-uv run python} -m benchmarks.gpu "$part" --out "$out" "${@:2}" || failed=1
done
exit "$failed"
