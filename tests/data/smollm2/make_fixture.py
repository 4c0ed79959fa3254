#!/usr/bin/env python3
"""expected.safetensors.ref: what tokenizers 0.23 and transformers 5.24 (float32) give for SmolLM2-135M as
shared/models/make_smollm2.py writes it. make_fixture.py MODEL SHARED OUT

<text>.ids   I64 [2]: number of token ids of the texts of a .jsonl joined by a blank line, XXH3 of them as int32
input_ids    I32 [2][96]: from the held-out text
indices      I32 [192][32]: the 16 largest logits of a position, then 16 spread over the vocabulary
logits       F32 [192][32]
"""
import json, sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import xxhash
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

model, shared, out = map(Path, sys.argv[1:])
tok = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
tensors = {}
for name in ("calib.jsonl", "heldout.jsonl"):
    text = "\n\n".join(json.loads(line)["text"] for line in open(shared / "text" / name, encoding="utf-8"))
    ids = np.array(tok.encode(text, add_special_tokens=False).ids, np.int32)
    tensors[name + ".ids"] = np.array([len(ids), xxhash.xxh3_64(ids.tobytes()).intdigest()], np.uint64).view(np.int64)
x = ids[5000:5192].reshape(2, 96)
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    logits = net(torch.tensor(x.astype(np.int64))).logits.reshape(192, -1).numpy()
indices = np.argsort(-logits, axis=1)[:, :16].astype(np.int32)
spread = np.array([(i * 3001 + 17) % logits.shape[1] for i in range(16)], np.int32)
indices = np.concatenate([indices, np.tile(spread, (192, 1))], axis=1)
tensors |= {"input_ids": x.copy(), "indices": indices, "logits": np.take_along_axis(logits, indices, axis=1)}
save_file(tensors, out)
