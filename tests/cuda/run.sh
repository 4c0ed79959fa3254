#!/bin/sh
# tests/cuda/run.sh BUILD: the CUDA tests of a build folder, counted together.
set -u
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for t in test_kernels tests; do
    "$1/tests/cuda/$t" >"$log" 2>&1
    rc=$?
    grep -v '^[0-9]* passed, ' "$log"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -1 | tr -cd '0-9 ')
    # shellcheck disable=SC2086
    set -- "$1" ${counts:-0 1 0}
    passed=$((passed + $2)) failed=$((failed + $3)) skipped=$((skipped + $4))
    [ "$rc" = 0 ] || [ "$3" != 0 ] || failed=$((failed + 1))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
