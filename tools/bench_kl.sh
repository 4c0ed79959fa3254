#!/bin/sh
# KL of tiny-qwen3 by the protocol of golden/README.md, seeds 1 to 3, beside the peer's figures on the same text.
# bench_kl.sh BUILD_FOLDER DATA [BITS...]
set -eu
build=$1
data=$2
shift 2
[ $# -gt 0 ] || set -- 2.0 2.5 3.0 4.0
model=$data/models/tiny-qwen3
out=build/bench-kl
mkdir -p $out
for skip in 0 10240; do
    "$build/exl3-eval" reference $model --text $data/text/heldout.jsonl --skip $skip --out $out/ref-$skip.x3r 2>/dev/null
done
kl() { awk '/^KL  /{print $2}'; }
peer() { case $1 in 2.0) echo 1.0440 0.7365 3534153;; 2.5) echo 0.5345 - 3681609;; 3.0) echo 0.2467 0.1622 3829065;; 4.0) echo 0.0560 0.0376 4123977;; *) echo - - -;; esac; }
echo "peer's packs (golden/packs; calibrated on its own text), first and second block:"
for p in mul1 mcg 3inst; do
    echo "  tiny-qwen3-3.0-$p" $(for s in 0 10240; do "$build/exl3-eval" score $data/golden/packs/tiny-qwen3-3.0-$p --ref $out/ref-$s.x3r 2>/dev/null | kl; done)
done
echo "| bits | seed | KL | second block | top-1 % | body bits | bytes |"
echo "| --- | --- | --- | --- | --- | --- | --- |"
for bits in "$@"; do
    sum=0; sum2=0
    for seed in 1 2 3; do
        pack=$out/$bits-$seed
        [ -e $pack/config.json ] || "$build/exl3-quantize" run $model $pack --bits $bits --uniform --seed $seed --rows 214 --text $data/text/calib.jsonl --resume >/dev/null 2>&1
        "$build/exl3-eval" score $pack --ref $out/ref-0.x3r >$pack.0.txt 2>/dev/null
        "$build/exl3-eval" score $pack --ref $out/ref-10240.x3r >$pack.1.txt 2>/dev/null
        a=$(kl <$pack.0.txt); b=$(kl <$pack.1.txt)
        echo "| $bits | $seed | $a | $b | $(awk '/^top-1/{print $2}' $pack.0.txt) | $(awk '/^bits/{print $3}' $pack.0.txt | tr -d ,) | $(awk '/^bits/{print $6}' $pack.0.txt) |"
        sum=$(echo "$sum $a" | awk '{print $1+$2}'); sum2=$(echo "$sum2 $b" | awk '{print $1+$2}')
    done
    set -- "$@"
    echo "$bits $sum $sum2 $(peer $bits)" | awk '{printf "| %s | mean | %.4f | %.4f | | | |\n| %s | peer | %s | %s | | | %s |\n", $1, $2/3, $3/3, $1, $4, $5, $6}'
done
