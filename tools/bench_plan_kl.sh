#!/bin/sh
# Planned packs beside uniform packs of the same bytes, and the peer's: the trained models by the protocol of golden/README.md,
# seeds 1 to 3, both blocks of held-out text. The difference is paired: each row's KL, mean over the seeds, planned less uniform.
# bench_plan_kl.sh BUILD_FOLDER DATA "MODEL..." "BITS..." [DEVICE [JOBS]]     (on a GPU, jobs run beside each other)
set -eu
build=$1 data=$2 models=$3 budgets=$4 device=${5:-cpu} jobs=${6:-1}
out=${OUT_FOLDER:-build/bench-plan-kl}
rows=${ROWS:-214}
mkdir -p "$out"
peer() { # KL, KL of the second block, bytes
    case $1-$2 in
    tiny-qwen3-2.0) echo 1.0440 .7365 3534153 ;; tiny-qwen3-2.5) echo .5345 - 3681609 ;;
    tiny-qwen3-3.0) echo .2467 .1622 3829065 ;; tiny-qwen3-4.0) echo .0560 .0376 4123977 ;;
    tiny-glm-moe-2.0) echo .7271 .5226 4001623 ;; tiny-glm-moe-2.5) echo .3129 - 4239191 ;;
    tiny-glm-moe-3.0) echo .1715 .1153 4480855 ;; tiny-glm-moe-4.0) echo .0463 .0303 4960087 ;;
    small-qwen3-moe-2.0) echo 1.2926 1.0186 8744397 ;; small-qwen3-moe-2.5) echo .6757 - 9997773 ;;
    small-qwen3-moe-3.0) echo .3039 .2704 11251256 ;; small-qwen3-moe-4.0) echo .0880 .0855 13759138 ;;
    *) echo - - - ;;
    esac
}
folder() { [ -d "$data/models/$1" ] && echo "$data/models/$1" || echo "$1"; }
noise() { awk -v bits="$1" 'BEGIN {print int(bits + .5)}'; }
name() { basename "$1"; }
one() { # MODEL BITS SEED: both packs and their scores
    model=$(folder "$1") m=$out/$(name "$1") p=$out/$(name "$1")-$2-$3
    "$build/exl3-quantize" plan "$model" --measure "$m-$3-$(noise "$2").json" --bits "$2" --out "$p.yaml" >"$p.plan.log" 2>&1
    for kind in planned uniform; do
        if [ $kind = planned ]; then how="--recipe $p.yaml"; else how="--bits $2 --uniform"; fi
        # shellcheck disable=SC2086
        [ -e "$p-$kind/config.json" ] || "$build/exl3-quantize" run "$model" "$p-$kind" $how --seed "$3" --rows "$rows" \
            --text "$data/text/calib.jsonl" --device "$device" --overwrite >"$p-$kind.log" 2>&1
        for skip in 0 10240; do
            "$build/exl3-eval" score "$p-$kind" --ref "$m-$skip.x3r" --json "$p-$kind-$skip.json" --device "$device" \
                >"$p-$kind-$skip.txt" 2>"$p-$kind-$skip.log"
        done
    done
}
prepare() { # MODEL: references and measurements
    model=$(folder "$1") m=$out/$(name "$1")
    for skip in 0 10240; do
        [ -e "$m-$skip.x3r" ] || "$build/exl3-eval" reference "$model" --text "$data/text/heldout.jsonl" --skip $skip \
            --out "$m-$skip.x3r" --device "$device" 2>/dev/null
    done
    for seed in 1 2 3; do
        for bits in $budgets; do
            f=$m-$seed-$(noise "$bits")
            # shellcheck disable=SC2086
            [ -e "$f.json" ] || "$build/exl3-quantize" measure "$model" --out "$f.json" --seed $seed --device "$device" \
                --text "$data/text/calib.jsonl" --noise-bits "$(noise "$bits")" ${MEASURE:-} >"$f.log" 2>&1
        done
    done
}
numbers() { tr -d ' \t\n' <"$1" | sed 's/.*"rows":\[\([^]]*\)\].*/\1/' | tr , '\n'; }
difference() { # MODEL BITS: mean and standard error of the paired rows of both blocks
    for skip in 0 10240; do
        for seed in 1 2 3; do
            p=$out/$(name "$1")-$2-$seed
            numbers "$p-planned-$skip.json" >"$p.a"; numbers "$p-uniform-$skip.json" >"$p.b"
            paste "$p.a" "$p.b" | awk -v skip=$skip '{print skip + NR, $1 - $2}'
        done
    done | awk '{n[$1]++; s[$1] += $2} END {for (i in n) {d = s[i] / n[i]; k++; t += d; q += d * d}
        m = t / k; printf "%+.4f (%.4f)", m, sqrt((q / k - m * m) / (k - 1))}'
}
mean() { cat "$@" | awk '/^KL  /{s += $2; n++} END {printf "%.4f", s / n}'; }
row() { # MODEL BITS
    p=$out/$(name "$1")-$2
    # shellcheck disable=SC2046
    set -- "$1" "$2" $(peer "$(name "$1")" "$2")
    echo "| $(name "$1") | $2 | $3 / $4 | $(mean "$p"-?-uniform-0.txt) / $(mean "$p"-?-uniform-10240.txt) |" \
        "$(mean "$p"-?-planned-0.txt) / $(mean "$p"-?-planned-10240.txt) | $(difference "$1" "$2") | $5 |" \
        "$(awk '/^bits/{print $6}' "$p-1-uniform-0.txt"), $(awk '/^bits/{print $6}' "$p-1-planned-0.txt") |"
}
for model in $models; do
    prepare "$model" &
    [ "$jobs" -gt 1 ] || wait
done
wait
running=0
for bits in $budgets; do
    for seed in 1 2 3; do
        for model in $models; do
            one "$model" "$bits" $seed &
            running=$((running + 1))
            [ $((running % jobs)) != 0 ] || wait
        done
    done
done
wait
echo "| model | bits | peer | uniform | planned | planned - uniform (s.e.) | peer's bytes | ours |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
for model in $models; do for bits in $budgets; do row "$model" "$bits"; done; done
