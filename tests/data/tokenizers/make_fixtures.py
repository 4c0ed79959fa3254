#!/usr/bin/env python3
"""Makes the tokenizer files and cases.bin of this folder. A development oracle: nothing here runs in the test suite.

Needs the Python package `tokenizers` (0.23.3 was used). The vocabularies are trained on the text below, which was
written for this purpose; the regular expressions are those of the published tokenizers.

    python3 make_fixtures.py [FOLDER]

cases.bin, little endian: u32 number of texts; each u32 bytes and the bytes. Then, until the end, one block for each
tokenizer and mode: u8 length and name, u8 mode (1: special tokens in the text are tokens, 0: they are text), then for
each text u16 number of ids and u16 ids; 65535 in place of a number: the ids of this text in the block before.
"""
import json
import os
import random
import struct
import sys

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = """
The river turned grey under the rain, and the ferryman pulled his coat tighter. "We'll cross before dark," he said, \
"or we won't cross at all." Nobody answered. There were 12 of them, 3 horses and 1,250 pounds of salt; it wasn't the \
first time they'd tried. I'm sure they've told the story since, and that it isn't the same story any more. She'd have \
said it's a small town's way of remembering: what didn't happen is retold until it did. In 1987 the bridge was built.
def count(words, limit=100):
    total = {}
    for word in words:
        if len(word) > 2 and word not in total:
            total[word] = total.get(word, 0) + 1
    return sorted(total.items(), key=lambda pair: -pair[1])[:limit]
#include <stdio.h>
int main(void) { for (int i = 0; i < 10; i++) printf("%d\\n", i * i); return 0; }
Le fleuve était gris sous la pluie, et le passeur a serré son manteau. « Nous passerons avant la nuit », dit-il. \
L'été dernier, c'était déjà trop tard. Où êtes-vous allés après la fête à Besançon ?
Der Fluss wurde grau unter dem Regen. Größe, Straße, Übermut und Äpfel kosten heute 3,50 Euro. Wir müssen hinüber.
El río se volvió gris bajo la lluvia. ¿Quién cruzará mañana? El niño pequeño no contestó.
Река стала серой под дождём, и паромщик плотнее запахнул пальто. Никто не ответил ему. Было двенадцать человек.
Ο ποταμός έγινε γκρίζος κάτω από τη βροχή. Κανείς δεν απάντησε.
أصبح النهر رماديًا تحت المطر، ولم يجب أحد. כולם שתקו והנהר נעשה אפור בגשם.
नदी बारिश में धूसर हो गई, और किसी ने उत्तर नहीं दिया। แม่น้ำกลายเป็นสีเทาใต้สายฝน ไม่มีใครตอบ
河在雨中变成了灰色，没有人回答。我们必须在天黑之前过河。雨の中で川は灰色になり、誰も答えなかった。カタカナとひらがな。
강은 비 아래에서 회색으로 변했고 아무도 대답하지 않았다. Dòng sông trở nên xám xịt dưới mưa. Không ai trả lời.
👍🏽 👩‍👩‍👧 🇫🇷 ❤️ 1️⃣ … — “quotes” and ‘more’ ½ ² €
"""

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTION + r"|[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER +
         "*" + CONTRACTION + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KIMI = (r"[\p{Han}]+|" + O200K.replace("]*", r"&&[^\p{Han}]]*").replace("]+", r"&&[^\p{Han}]]+")
        .replace(r"[^\s\p{L}\p{N}&&[^\p{Han}]]+[\r\n/&&[^\p{Han}]]*", r"[^\s\p{L}\p{N}]+[\r\n]*")
        .replace(r"[\r\n&&[^\p{Han}]]+", r"[\r\n]+"))
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
            r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(prefix=False, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def added(content, special=True, **flags):
    token = {"id": 0, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": special}
    token.update(flags)
    return token


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


def template(token):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [token], "tokens": [token]}}}


CHAT = [added("<|endoftext|>"), added("<|im_start|>"), added("<|im_end|>"), added("<think>", special=False),
        added("</think>", special=False)]
FLAGS = [added("<|end|>"), added("<left>", lstrip=True), added("<right>", rstrip=True), added("<both>", lstrip=True,
         rstrip=True), added("<word>", single_word=True), added("<wordnorm>", special=False, normalized=True,
         single_word=True), added("café", special=False, normalized=True), added("cafe\u0301!", special=False),
         added("\u1e9b\u0323", special=False, normalized=True), added("the ferry", special=False, normalized=True,
         lstrip=True), added("the", special=False, rstrip=True, normalized=True), added("<|end|><|end|>"),
         added("  ", special=False), added("Straße", special=False, single_word=True), added("雨")]

RECIPES = {
    "qwen2": dict(normalizer={"type": "NFC"}, pre=[split(QWEN2), byte_level()], tokens=CHAT),
    "qwen35": dict(normalizer={"type": "NFC"}, pre=[split(QWEN35), byte_level()], tokens=CHAT),
    "llama3": dict(pre=[split(LLAMA3), byte_level()], tokens=[added("<|begin_of_text|>"), added("<|end_of_text|>"),
                   added("<|eot_id|>")], ignore_merges=True, string_merges=True,
                   post=sequence("processors", byte_level(True, True), template("<|begin_of_text|>"))),
    "glm4": dict(pre=[split(LLAMA3), byte_level()], tokens=[added("[gMASK]"), added("<sop>"), added("<|user|>"),
                 added("<|assistant|>"), added("<|observation|>", special=False)], string_merges=True),
    "o200k": dict(pre=[split(O200K), byte_level()], tokens=CHAT[:1], ignore_merges=True),
    "kimi": dict(pre=[split(KIMI), byte_level()], tokens=CHAT[:1]),
    "flags": dict(normalizer=sequence("normalizers", {"type": "NFC"}), pre=[split(QWEN2), byte_level()], tokens=FLAGS),
    "gpt2": dict(pre=[byte_level(True, True)], tokens=[added("<|endoftext|>", normalized=True)], string_merges=True),
    "behaviors": dict(pre=[split(r"\d", "Contiguous"), split(", ", "MergedWithPrevious", kind="String"),
                           split(r"[A-Z]", "MergedWithNext"), split(r"\h{3,}+|\w\b", "Removed"),
                           split(r"[\w&&[^\d_]]+|\R", "MergedWithNext", invert=True),
                           {"type": "Digits", "individual_digits": False}, byte_level(True)], tokens=CHAT[:1]),
    "deepseek_v3": dict(normalizer=sequence("normalizers"), pre=[split(p) for p in DEEPSEEK] + [byte_level()],
                        tokens=[added("<｜begin▁of▁sentence｜>"), added("<｜User｜>", special=False),
                                added("<｜Assistant｜>", special=False)]),
    "smollm": dict(pre=[{"type": "Digits", "individual_digits": True}, byte_level(regex=True)], tokens=CHAT[:3],
                   string_merges=True, short_alphabet=True),
}


def build(name, recipe):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if recipe.get("short_alphabet"):  # SmolLM2 has no token for these bytes
        alphabet = [c for c in alphabet if c not in "ĄĆēĔĖĝÀÁñòõö÷øùúûüýþÿ"]
    trainer = trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([TEXT], trainer)
    root = json.loads(trained.to_str())
    model = root["model"]
    tokens = [dict(t) for t in recipe["tokens"]]
    if name == "deepseek_v3":  # there the first added token is in the vocabulary, too
        model["vocab"] = {t: i + 1 for t, i in model["vocab"].items()}
        model["vocab"][tokens[0]["content"]] = 0
    next_id = len(model["vocab"])
    for t in tokens:
        t["id"] = model["vocab"].get(t["content"], next_id)
        next_id += t["id"] == next_id
    model["ignore_merges"] = recipe.get("ignore_merges", False)
    if recipe.get("string_merges"):
        model["merges"] = [" ".join(m) for m in model["merges"]]
    root["added_tokens"] = tokens
    root["normalizer"] = recipe.get("normalizer")
    root["pre_tokenizer"] = recipe["pre"][0] if len(recipe["pre"]) == 1 else sequence("pretokenizers", *recipe["pre"])
    root["decoder"] = byte_level(True, True)
    root["post_processor"] = recipe.get("post")
    text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
    for t in tokens:  # the ids of a template
        text = text.replace('"ids":["%s"]' % t["content"], '"ids":[%d]' % t["id"])
    return text


CURLY = "\u2019"
TEXTS = [
    "", " ", "\n", "a", "The river turned grey under the rain.", "I'm sure they've told it; SHE'D SAID IT'S, we'LL, don'T",
    "'\u017f '\u017f! it'\u017f 'S'T'RE'VE'M'LL'D", "\u212aelvin '\u212a", "it" + CURLY + "s we" + CURLY + "ll", "''s 's'",
    "1", "12", "123", "1234567890", "3.14159e-10", "x1y22z333w4444", "٣٤٥ १२३ １２３ ²³ ½ Ⅷ 〇 ௧௨ 𝟘𝟙", "1\u0301 2\u20e3",
    "a\u0301 e\u0301\u0323 E\u0323\u0301 q\u0307\u0323 \u0301x", "\u1e9b\u0323 \u212b \u2126 \ufb01 \u0958 \u0344",
    "각\u1112\u1161\u11ab \u1100\uac00\u11a8 \uc384\u11a7\u11a8", "a\U00010160\xb9\U00010163 x\xbc", "\u0b47\u0b3e \u09c7\u09be \U0001d157\U0001d165 \U00011935\U00011930",
    "o\u0302\u0301\u0323\u0327\u0315\u0345\u0334\u0338\u05b0\u0591", "a\u07fd\u0334b\u1abf\u0301\u1ac0\u0334",
    "नदी बारिश में धूसर हो गई।", "แม่น้ำกลายเป็นสีเทา", "أصبح النهر رماديًا", "כולם שתקו ש\u05bc\u05c1\u05b8", "தமிழ் மொழி",
    "河在雨中变成了灰色，没有人回答。123abc", "雨の中で川はカタカナ・ｶﾀｶﾅー々〆ヶ", "강은 비 아래에서", "Ο ποταμός ΈΓΙΝΕ ς", "Река СТАЛА серой",
    "Dòng sông trở nên xám xịt", "Größe STRASSE straße ẞ ŉ ǅ Ǆ ʰ ª º", "汉字HanABC漢字\u3007\u2e80\u3021\u30fc",
    "👍🏽 👩‍👩‍👧 🇫🇷🇩🇪 ❤️ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f", "\u200d\u200b\u200e\ufeff\u00ad\u2060\ufe0f",
    "  two  spaces   three    four ", "tab\ttab\t\tx \t y\t ", "line\nline\n\nline\r\nline\r\r\n\n x", " \n \n\n  \n x  ",
    "a\u00a0b\u1680c\u180ed\u2003e\u2028f\u2029g\u202fh\u205fi\u3000j\u0085k\u000bl\u000cm\u001cn",
    "\u3000\u3000x\u3000 \u00a0y \u180e z\u180e \u180e\u180e", "\u0085\u0085\u2028x\u2028\n\u2029", "!\n\n!\r\n?!\n ...\n/\n//\r\n",
    "(parenthesis) [x] {y} <z> «q» “r” — … ‽ ¿?", "$5 €6 ±7 ×8 +9 ^ ` ~ | \\ @ # & * _ __ ___a_b_", "!important #define @user .net /usr/bin",
    "camelCase HTTPServer XMLHttpRequest iPhone ABCdef ABC's abc'S", "foo_bar.baz(qux)->x[0] += 0x1F;", "    return total\n\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "the" * 60, "=" * 70,
    " " * 80, " " * 70 + "x", "\n" * 70, "\t" * 5 + "\n" * 3 + " " * 5 + "\u00a0" * 3, "\x00", "a\x00b\x00\x00 \x00\n", "\x01\x04\x06\x13\x14\x16\x1d\x7f\x80\x9f",
    "<|endoftext|>", "a<|im_start|>user\nhi<|im_end|>\n<think>x</think>", "<|im_start|><|im_start|>", "<|im_start |> <|im_", "<<|im_end|>>",
    "<|begin_of_text|>x<|eot_id|> <|end_of_text|>", "[gMASK]<sop><|user|>\nhi<|assistant|>\n<|observation|>", "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>",
    "a <left> b", "a  <left>  b", "<left>", "  <left>", "a <right> b", "a<right>\u3000\n b", "<right>  ", "a \u00a0<both>\u0085 b",
    "<both> <both>", "<right> <left>", "<word> x<word> <word>x _<word>", "<word>,<word>.", "e\u0301<word>", "<word>\u0301 <word>\u200d <word>\u00b2",
    "a<wordnorm>b <wordnorm> é<wordnorm>", "café cafe\u0301 cafe\u0301! café!", "\u1e9b\u0323 \u017f\u0323\u0307", " the ferry the  ferry the\nferry", "the  \n the",
    "<|end|><|end|><|end|>", "<|end|> <|end|>", "a  b   c    d", "Straße Straßen xStraße", "雨雨 雨の", "the <right>  <left> the",
    "a, b, c,d, 12, 345, Abc DEF, xyz12ab34", "abcdef 0123 deadbeef g", "A, BC, , d", "x\r\ny\nz\u2028w", "ÀÉ ñò õö÷ø \U00040000\U00080000\U000c0000",
]
BYTES = [
    b"\xff", b"a\xc3", b"\xc3\x28 \xa0\xa1", b"\xe2\x82", b"\xe2\x28\xa1", b"\xed\xa0\x80\xed\xbf\xbf", b"\xf0\x9f\x98", b"\xf0\x9f\x98x",
    b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf\xc1\xbf", b"\xe0\x80\xaf\xe0\x9f\xbf", b"\xf0\x80\x80\xaf\xf0\x8f\xbf\xbf", b"\x80\x80\xbf",
    b"e\xcc\x81\xcc", b"\xef\xbb\xbfbom", b"<|im_start|>\xff<|im_end|>\xc3", b"\xe4\xb8\xad\xe4\xb8", b"12\xff34\xfe ",
]


def random_texts(count):
    rng = random.Random(20250101)
    pools = [TEXT, " \t\n\r\u00a0\u3000\u0085\u2028", "0123456789٣१²½", "'sStTrReEvVmMlLdD\u017f", "\u0301\u0323\u0308\u05b0\u093c\u3099",
             "!?.,;:()[]{}<>@#$%^&*_-+=|~`\"\\/", "ABCDEFabcdefÉéЖжΣσςǅ", "漢字かなカナ한글ไทย", "👍🏽\u200d❤\ufe0f🇫🇷", "\x00\x07\x1b\x7f\u200b\ufeff"]
    for _ in range(count):
        text = ""
        for _ in range(rng.randrange(1, 9)):
            pool = rng.choice(pools)
            if pool is TEXT and rng.random() < 0.6:
                at = rng.randrange(len(pool))
                text += pool[at:at + rng.randrange(1, 14)]
            else:
                text += "".join(rng.choice(pool) for _ in range(rng.randrange(1, 5)))
        yield text


def long_words():
    """Single pre-tokens that are merged through the heap."""
    rng = random.Random(7)
    for letters, n in (("eatinorshl", 70), ("theandofw", 300), ("th", 150), ("éàü", 90), ("река", 120)):
        yield "".join(rng.choice(letters) for _ in range(n))


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    texts = [t.encode() for t in TEXTS] + BYTES + [t.encode() for t in [*long_words(), *random_texts(60)]]
    out = [struct.pack("<I", len(texts))] + [struct.pack("<I", len(t)) + t for t in texts]
    before = [None] * len(texts)
    for name, recipe in RECIPES.items():
        json_text = build(name, recipe)
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
            f.write(json_text + "\n")
        tokenizer = Tokenizer.from_str(json_text)
        for mode in (1, 0):
            tokenizer.encode_special_tokens = mode == 0
            block = struct.pack("<B", len(name)) + name.encode() + struct.pack("<B", mode)
            for i, t in enumerate(texts):
                ids = tokenizer.encode(t.decode("utf-8", errors="replace"), add_special_tokens=False).ids
                same = ids == before[i]
                block += struct.pack("<H", 65535) if same else struct.pack("<H%dH" % len(ids), len(ids), *ids)
                before[i] = ids
            out.append(block)
    with open(os.path.join(folder, "cases.bin"), "wb") as f:
        f.write(b"".join(out))


if __name__ == "__main__":
    main()
