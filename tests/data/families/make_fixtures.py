#!/usr/bin/env python3
"""Makes the folders beside this file: tiny random models with transformers' logits, for what the shared fixtures do not
exercise. Needs torch and transformers 5.24. Each folder gets config.json, model.safetensors (BF16) and
reference_logits.safetensors.ref: 48 input_ids, float32 logits of one full forward without a cache, every third position.

Draft layers (MTP): transformers has no forward for them. The class of the main layers is run on what vLLM and SGLang give
them, fc([norm(embedding of the next token), norm(output of the final norm)]); draft_logits are those of positions 0, 3, ...
of 47."""
import copy
import json
import os
import sys
import tempfile

import torch
import transformers as T
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
N_IDS, VOCAB = 48, 96


def randomize(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for name, p in list(model.named_parameters()) + list(model.named_buffers()):
        if "inv_freq" in name:
            continue
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() == 1 and "norm" in name and "bias" not in name:
            p.data = p.data.float() + 0.1 * noise
        elif p.dim() == 1:
            p.data = 0.3 * noise
        else:
            p.data = (0.5 if "embed" in name else 0.12) * noise
        p.data = p.data.to(torch.bfloat16).float()


def save(name, model, config_edit=None, extra=None, rename=None, store_dtype=torch.bfloat16, draft=None):
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    model.eval()
    ids = torch.randint(3, VOCAB, (1, N_IDS), generator=torch.Generator().manual_seed(3))
    text = model
    with torch.no_grad():
        logits = text(input_ids=ids, use_cache=False).logits[0, ::3].float().contiguous()
        draft_tensors, draft_logits = draft(model, ids) if draft else ({}, None)
    model.save_pretrained(folder)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    tensors = {(rename(k) if rename else k): v.to(store_dtype) for k, v in tensors.items()}
    generator = torch.Generator().manual_seed(9)
    for k, shape in (extra or {}).items():
        tensors[k] = torch.randn(shape, generator=generator).to(store_dtype)
    tensors.update({k: v.to(store_dtype) for k, v in draft_tensors.items()})
    save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    config["dtype"] = "bfloat16"
    if config_edit:
        config = config_edit(config) or config
    json.dump(config, open(path, "w"), indent=1)
    open(path, "a").write("\n")
    for side in ("generation_config.json",):
        if os.path.exists(os.path.join(folder, side)):
            os.remove(os.path.join(folder, side))
    reference = {"input_ids": ids, "logits": logits}
    if draft:
        reference["draft_logits"] = draft_logits
    save_file(reference, os.path.join(folder, "reference_logits.safetensors.ref"))
    print(f"{name}: logits std {logits.std():.2f}, {os.path.getsize(os.path.join(folder, 'model.safetensors'))} bytes")


COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, max_position_embeddings=1024, bos_token_id=1,
              eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, attn_implementation="eager")


def build(cls, config):
    torch.manual_seed(0)
    model = cls(config)
    randomize(model)
    return model


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def make_draft(cls, config, layer, fc, embed_norm, hidden_norm, out_norm, head=None, embed=None, centred=False):
    """A function of the main model and ids: tensors and logits of one draft layer. config is of a model of that layer alone."""
    def run(main, ids):
        torch.manual_seed(0)
        block = cls(config)
        randomize(block, 6)
        block.eval()
        generator = torch.Generator().manual_seed(7)
        bf16 = lambda shape, scale, add=0: (add + scale * torch.randn(shape, generator=generator)).to(torch.bfloat16).float()
        h, vocab, one = config.hidden_size, config.vocab_size, 0 if centred else 1
        new = {fc + ".weight": bf16((h, 2 * h), 0.12), embed_norm: bf16(h, 0.1, one), hidden_norm: bf16(h, 0.1, one)}
        weight = lambda name: new[name] + (1 if centred else 0)
        if head:
            new[head + ".weight"] = bf16((vocab, h), 0.12)
        if embed:
            new[embed] = main.model.embed_tokens.weight
        states = main.model(input_ids=ids, use_cache=False).last_hidden_state
        both = torch.cat([rms_norm(main.model.embed_tokens(ids[:, 1:]), weight(embed_norm), config.rms_norm_eps),
                          rms_norm(states[:, :-1], weight(hidden_norm), config.rms_norm_eps)], -1)
        out = block.model(inputs_embeds=both @ new[fc + ".weight"].T, use_cache=False).last_hidden_state
        logits = out @ (new[head + ".weight"] if head else main.lm_head.weight).T
        with tempfile.TemporaryDirectory() as folder:
            block.save_pretrained(folder)
            saved = load_file(os.path.join(folder, "model.safetensors"))
        for k, v in saved.items():
            if ".layers.0." in k:
                new[layer + k.split(".layers.0", 1)[1]] = v
            elif k.endswith(".norm.weight"):
                new[out_norm] = v
        return new, logits[0, ::3].float().contiguous()
    return run


def nextn(cls, config, index):
    """The names of DeepSeek and GLM: a layer past the last, with copies of the embedding and a head of its own."""
    at = f"model.layers.{index}"
    return make_draft(cls, config, at, at + ".eh_proj", at + ".enorm.weight", at + ".hnorm.weight",
                      at + ".shared_head.norm.weight", at + ".shared_head.head", at + ".embed_tokens.weight")


def mtp(cls, config):
    """Those of Qwen3-Next and Qwen3.5."""
    return make_draft(cls, config, "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding.weight",
                      "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight", centred=True)


def alone(config, **changes):
    """The config of a model of the draft layer alone."""
    c = copy.deepcopy(config)
    c.num_hidden_layers = 1
    for k, v in changes.items():
        setattr(c, k, v)
    return c


def llama3_rope():
    """llama-3 rope scaling, biases everywhere, tied head."""
    config = T.LlamaConfig(**{**COMMON, "tie_word_embeddings": True}, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                           attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5,
                           rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0,
                                                high_freq_factor=4.0, original_max_position_embeddings=24))
    save("llama3_rope", build(T.LlamaForCausalLM, config))


def deepseek_yarn():
    """MLA with biases, without a query latent, halves rope, yarn with mscale; 4 expert groups of which 2; one draft layer;
    the old names of the rope options."""
    config = T.DeepseekV3Config(**COMMON, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None,
                                kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, rope_interleave=False,
                                attention_bias=True, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3,
                                n_group=4, topk_group=2, n_shared_experts=2, moe_intermediate_size=32,
                                routed_scaling_factor=2.5, norm_topk_prob=True, rms_norm_eps=1e-6,
                                rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32,
                                                     beta_slow=1, mscale=1.0, mscale_all_dim=0.8,
                                                     original_max_position_embeddings=24))

    def edit(c):
        rope = c.pop("rope_parameters")
        c["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        c["rope_scaling"] = rope
        c.update(num_nextn_predict_layers=1, scoring_func="sigmoid", topk_method="noaux_tc", ep_size=1, moe_layer_freq=1)

    save("deepseek_yarn", build(T.DeepseekV3ForCausalLM, config), edit,
         draft=nextn(T.DeepseekV3ForCausalLM, alone(config, first_k_dense_replace=0), 3))


def glm_dsa_shared():
    """Five sparse layers, of which every second one shares the selection from layer 2 on, by frequency; top 6 of 48."""
    config = T.GlmMoeDsaConfig(**COMMON, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32,
                               kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, index_topk=6,
                               index_n_heads=8, index_head_dim=32, index_topk_freq=2, first_k_dense_replace=5,
                               n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
                               rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=1000.0))

    def edit(c):
        print("  indexer_types", c.pop("indexer_types"))
        for k in ("mlp_layer_types", "layer_types"):
            c.pop(k, None)
        c.update(index_topk_freq=2, index_skip_topk_offset=2, indexer_rope_interleave=True, num_nextn_predict_layers=1,
                 index_share_for_mtp_iteration=True, moe_router_dtype="float32")

    save("glm_dsa_shared", build(T.GlmMoeDsaForCausalLM, config), edit, {"model.layers.5.eh_proj.weight": (64, 128)})


def qwen3_5_nested():
    """The names of a release: text_config, model.language_model, a vision tower and draft layers beside it."""
    text = T.Qwen3_5TextConfig(**COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                               linear_conv_kernel_dim=3, linear_key_head_dim=16, linear_value_head_dim=24,
                               linear_num_key_heads=2, linear_num_value_heads=6,
                               rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25,
                                                    mrope_section=[2, 1, 1], mrope_interleaved=True))

    def edit(c):
        c.pop("architectures")
        for k in ("layer_types",):
            c.pop(k)
        c.update(full_attention_interval=4, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
                 mtp_use_dedicated_embeddings=False, output_gate_type="swish")
        return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": c,
                "vision_config": {"depth": 1, "hidden_size": 32}, "image_token_id": 5, "tie_word_embeddings": False}

    extra = {"model.visual.patch_embed.proj.weight": (32, 3, 2, 4, 4), "model.visual.blocks.0.attn.qkv.weight": (96, 32),
             "model.visual.blocks.0.attn.qkv.bias": (96,)}
    save("qwen3_5_nested", build(T.Qwen3_5ForCausalLM, text), edit, extra,
         lambda k: k.replace("model.", "model.language_model.", 1) if k.startswith("model.") and "language_model" not in k else k,
         draft=mtp(T.Qwen3_5ForCausalLM, alone(text, layer_types=["full_attention"])))


def qwen3_next_long():
    """Fused projections with three value heads a key head, attention biases, layers without experts."""
    config = T.Qwen3NextConfig(**COMMON, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                               attention_bias=True, linear_conv_kernel_dim=4, linear_key_head_dim=24,
                               linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
                               num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                               shared_expert_intermediate_size=48, decoder_sparse_step=2, mlp_only_layers=[3],
                               layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                               rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
    save("qwen3_next_mixed", build(T.Qwen3NextForCausalLM, config),
         draft=mtp(T.Qwen3NextForCausalLM, alone(config, layer_types=["full_attention"], decoder_sparse_step=1,
                                                 mlp_only_layers=[])))


def mimo():
    """Window layers with head counts and sizes of their own, a window longer than the text, sinks, the keys of a release.
    transformers has one size for both kinds: the window layers here are its attention with a second config."""
    config = T.MiMoV2FlashConfig(**COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
                                 v_head_dim=16, sliding_window=101, attention_value_scale=0.612,
                                 layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                                 mlp_layer_types=["dense", "sparse", "sparse", "sparse"], n_routed_experts=4,
                                 num_experts_per_tok=2, moe_intermediate_size=32,
                                 rope_parameters={"full_attention": dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.334),
                                                  "sliding_attention": dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.334)})
    model = T.MiMoV2FlashForCausalLM(config)
    window = copy.deepcopy(config)
    window.num_attention_heads, window.num_key_value_heads, window.head_dim, window.v_head_dim = 6, 1, 24, 8
    for i in (1, 2):
        attention = type(model.model.layers[i].self_attn)(window, i)
        model.model.layers[i].self_attn = attention
    rotary = model.model.rotary_emb
    inv, _ = rotary.compute_default_rope_parameters(window, layer_type="sliding_attention")
    rotary.sliding_attention_inv_freq = inv
    randomize(model)

    def edit(c):
        for k in ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window"):
            c.pop(k, None)
        c.update(hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1], rope_theta=5e6, swa_rope_theta=1e4,
                 partial_rotary_factor=0.334, layernorm_epsilon=1e-5, sliding_window=100, sliding_window_size=100,
                 attention_chunk_size=100, swa_num_attention_heads=6, swa_num_key_value_heads=2, swa_head_dim=24,
                 swa_v_head_dim=8, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False,
                 attention_projection_layout="split", scoring_func="sigmoid", topk_method="noaux_tc",
                 n_shared_experts=None, routed_scaling_factor=None)

    save("mimo_sizes", model, edit, {"model.mtp.layers.0.eh_proj.weight": (64, 128)})


def qwen2_moe():
    """The family of our choice: one row of the table."""
    config = T.Qwen2MoeConfig(**COMMON, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, num_experts=6,
                              num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
                              decoder_sparse_step=1, mlp_only_layers=[0], norm_topk_prob=False, use_sliding_window=True,
                              sliding_window=12, max_window_layers=1, rms_norm_eps=1e-6,
                              rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    save("qwen2_moe", build(T.Qwen2MoeForCausalLM, config))


def deepseek_v32_long():
    """Sparse attention with a query shorter than the top-k at first: exact below, sparse above; yarn, two groups."""
    config = T.DeepseekV32Config(**COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32,
                                 kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, index_topk=30,
                                 index_n_heads=8, index_head_dim=32, first_k_dense_replace=1, n_routed_experts=8,
                                 num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32,
                                 n_shared_experts=1, rms_norm_eps=1e-5,
                                 rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                                      original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
                                                      beta_fast=32, beta_slow=1))
    save("deepseek_v32_long", build(T.DeepseekV32ForCausalLM, config), lambda c: c.update(num_nextn_predict_layers=1),
         draft=nextn(T.DeepseekV32ForCausalLM, alone(config, first_k_dense_replace=0, mlp_layer_types=["sparse"],
                                                     layer_types=["indexed_attention"]), 2))


# ---- two layers of each of the other families, so that the suite has every one of them

PLAIN = dict(rope_type="default", rope_theta=10000.0)
GQA = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters=PLAIN)
SIGMOID_MOE = dict(num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1, routed_scaling_factor=1.8, norm_topk_prob=True)


def mistral():
    """A window shorter than the text."""
    save("mistral", build(T.MistralForCausalLM, T.MistralConfig(**COMMON, **GQA, head_dim=24, sliding_window=9)))


def mixtral():
    """A window longer than the text."""
    save("mixtral", build(T.MixtralForCausalLM, T.MixtralConfig(**COMMON, **GQA, head_dim=16, sliding_window=100, num_local_experts=5,
                                                                num_experts_per_tok=2)))


def qwen2():
    """A window on the second layer only, tied head."""
    config = T.Qwen2Config(**{**COMMON, "tie_word_embeddings": True}, **GQA, use_sliding_window=True, sliding_window=7,
                           max_window_layers=1)
    save("qwen2", build(T.Qwen2ForCausalLM, config))


def qwen3_moe():
    """With and without experts, biases; weights of experts not normalized."""
    config = T.Qwen3MoeConfig(**COMMON, **GQA, head_dim=24, attention_bias=True, num_experts=6, num_experts_per_tok=3,
                              moe_intermediate_size=32, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[1])
    save("qwen3_moe", build(T.Qwen3MoeForCausalLM, config))


def glm4_moe():
    """Two groups of experts of which one, q and k norms, biases, partial rope."""
    config = T.Glm4MoeConfig(**COMMON, **{**GQA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, **SIGMOID_MOE, head_dim=32, attention_bias=True,
                             use_qk_norm=True, first_k_dense_replace=1, n_routed_experts=8, n_group=2, topk_group=1)
    save("glm4_moe", build(T.Glm4MoeForCausalLM, config))


def glm4_moe_lite():
    """MLA with a query latent, three groups of experts of which two."""
    config = T.Glm4MoeLiteConfig(**COMMON, **{**GQA, "num_key_value_heads": 4}, **SIGMOID_MOE, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=24,
                                 qk_rope_head_dim=16, v_head_dim=24, first_k_dense_replace=1, n_routed_experts=6, n_group=3,
                                 topk_group=2)
    save("glm4_moe_lite", build(T.Glm4MoeLiteForCausalLM, config))


def qwen3_5_moe():
    """A delta net and gated attention, experts in both."""
    config = T.Qwen3_5MoeTextConfig(**COMMON, **{**GQA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}, head_dim=32, linear_conv_kernel_dim=4,
                                    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                                    linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                    shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"])
    save("qwen3_5_moe", build(T.Qwen3_5MoeForCausalLM, config))


def hy_v3():
    config = T.HYV3Config(**COMMON, **GQA, head_dim=24, num_experts=6, num_experts_per_tok=2, num_shared_experts=1,
                          moe_intermediate_size=32, first_k_dense_replace=1, router_scaling_factor=2.8)
    save("hy_v3", build(T.HYV3ForCausalLM, config))


def dots1():
    """dots.llm1: Qwen3's attention, DeepSeek's experts; one row of the table."""
    config = T.Dots1Config(**COMMON, **GQA, **SIGMOID_MOE, first_k_dense_replace=1, n_routed_experts=6, n_group=1, topk_group=1,
                           sliding_window=None)
    save("dots1", build(T.Dots1ForCausalLM, config), lambda c: c.update(scoring_func="noaux_tc"))


def seed_oss():
    """Seed-OSS: Llama with biases on q, k and v alone; one row of the table."""
    config = T.SeedOssConfig(**COMMON, **GQA, head_dim=24, attention_bias=True, attention_out_bias=False, mlp_bias=False)
    save("seed_oss", build(T.SeedOssForCausalLM, config))


MAKERS = [llama3_rope, deepseek_yarn, glm_dsa_shared, qwen3_5_nested, qwen3_next_long, mimo, qwen2_moe, deepseek_v32_long,
          mistral, mixtral, qwen2, qwen3_moe, glm4_moe, glm4_moe_lite, qwen3_5_moe, hy_v3, dots1, seed_oss]

if __name__ == "__main__":
    for maker in MAKERS:
        if len(sys.argv) < 2 or maker.__name__ in sys.argv[1:]:
            maker()
