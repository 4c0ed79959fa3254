#!/bin/sh
# SmolLM2-135M at 4 and 3 bits: time, memory, KL on two blocks, and a question. bench_smollm2.sh BUILD DATA MODEL
set -eu
build=$1
data=$2
model=${3:?MODEL=folder: make it with $data/models/make_smollm2.py}
out=build/smollm2
mkdir -p $out
for skip in 0 10240; do
    [ -e $out/ref-$skip.x3r ] || "$build/exl3-eval" reference $model --text $data/text/heldout.jsonl --skip $skip --out $out/ref-$skip.x3r 2>/dev/null
done
for bits in 4.0 3.0; do
    pack=$out/$bits
    [ -e $pack/config.json ] || /usr/bin/env time -f "wall %E, peak memory %M KiB" -o $pack.time "$build/exl3-quantize" run $model $pack --bits $bits --uniform --rows 24 --text $data/text/calib.jsonl >$pack.log 2>&1
    echo "== $bits bits"
    grep -E '^(bits|error|time|peak)' $pack.log | tail -4
    cat $pack.time 2>/dev/null || true
    for skip in 0 10240; do
        echo "-- positions from $skip"
        "$build/exl3-eval" score $pack --ref $out/ref-$skip.x3r --json $pack-$skip.json 2>/dev/null | grep -E '^(KL|top|NLL)'
    done
done
echo "== what is the capital of France? (4 bits, greedy)"
"$build/exl3-eval" generate $out/4.0 --max-tokens 64 --prompt "<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of France?<|im_end|>
<|im_start|>assistant
" >$out/answer.txt
cat $out/answer.txt
grep -q Paris $out/answer.txt || { echo "the answer does not say Paris"; exit 1; }
