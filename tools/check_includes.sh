#!/bin/sh
# A folder includes only itself and folders before it: formats < kernels < runtime < calib < quant < tools; tests: any.
set -eu
cd "$(dirname "$0")/.."
bad=0
allowed=""
for folder in formats kernels runtime calib quant tools; do
    allowed="$allowed $folder"
    pattern=$(echo $allowed | tr ' ' '|')
    found=$(grep -rnE '^#include "' --include=*.c --include=*.h --include=*.cu --include=*.cuh "$folder" | grep -vE "\"($pattern)/" || true)
    if [ -n "$found" ]; then
        echo "$found"
        bad=1
    fi
done
[ $bad = 0 ] && echo "include order: ok" || { echo "include order: broken"; exit 1; }
