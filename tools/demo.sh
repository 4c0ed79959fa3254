#!/bin/sh
# Quantizes the bundled model at 3 bits on the bundled calibration text, verifies the pack, and prints what was lost on
# the bundled held-out text. demo.sh BUILD_FOLDER
set -eu
cd "$(dirname "$0")/.."
build=$1
model=tests/data/models/tiny-qwen3
pack=build/demo/tiny-qwen3-3.0
mkdir -p build/demo
texts() { for f in tests/data/text/$1_*.txt; do printf ' --text %s' "$f"; done; }

echo "== quantize $model at 3 bits"
"$build/exl3-quantize" run $model $pack --bits 3.0 --uniform --cols 1024 $(texts calib) --overwrite
echo
echo "== verify the pack against the model"
"$build/exl3-quantize" verify $pack --source $model | tail -1
echo
echo "== what was lost, on text that was not used for calibration"
"$build/exl3-eval" compare $model $pack $(texts heldout) --json build/demo/receipt.json
echo
echo "receipts: $pack/exl3_receipt.json, build/demo/receipt.json"
