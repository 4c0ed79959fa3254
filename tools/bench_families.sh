#!/bin/sh
# Packs of the tiny families at 3, 4 and 6 bits: each verifies and loads, and its KL against the source is finite and falls
# with the bits. Random weights: the figures say nothing about real models.
# bench_families.sh BUILD_FOLDER DATA [FAMILY...]
set -eu
build=$1
data=$2
shift 2
[ $# -gt 0 ] || set -- llama qwen2 qwen3_moe glm4_moe deepseek_v3 glm_moe_dsa qwen3_next qwen3_5_text qwen3_5_moe_text \
    mimo_v2_flash mixtral mistral hy_v3 glm4_moe_lite deepseek_v32
out=build/bench-families
mkdir -p $out
failed=0
echo "| family | KL at 3 bits | 4 bits | 6 bits |"
echo "| --- | --- | --- | --- |"
for family in "$@"; do
    model=$out/$family
    if [ ! -e $model/tokenizer.json ]; then
        mkdir -p $model
        cp $data/families/$family/*.json $data/families/$family/*.safetensors $model/
        chmod -R u+w $model
        cp $data/families/deepseek_v41/tokenizer.json $model/ # of 512 tokens, as all these families have
    fi
    [ -e $model.x3r ] || "$build/exl3-eval" reference $model --text $data/text/heldout.jsonl --ctx 128 --positions 1024 \
        --out $model.x3r >/dev/null 2>&1
    row="| $family |"; last=1e9
    for bits in 3 4 6; do
        pack=$model-$bits
        [ -e $pack/config.json ] || "$build/exl3-quantize" run $model $pack --bits $bits --uniform --head-bits $bits --rows 32 \
            --cols 128 --text $data/text/calib.jsonl --resume ${THREADS:+--threads $THREADS} >$pack.log 2>&1
        "$build/exl3-quantize" verify $pack --source $model >$pack.verify 2>&1 || { echo "$pack does not verify"; failed=1; }
        kl=$("$build/exl3-eval" score $pack --ref $model.x3r 2>/dev/null | awk '/^KL  /{print $2}')
        row="$row $kl |"
        awk -v kl="$kl" -v last="$last" 'BEGIN{exit !(kl + 0 == kl && kl >= 0 && kl < last)}' ||
            { echo "$family: KL $kl at $bits bits after $last"; failed=1; }
        last=$kl
    done
    echo "$row"
done
exit $failed
