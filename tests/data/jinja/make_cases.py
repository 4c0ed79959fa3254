"""Writes cases.json: templates of our own, their variables, and the text that transformers 5.24 with jinja2 3.1 renders
(or, for errors, what our message must contain: "t:LINE: " and words of the construct). Run with Python that has both:

    python tests/data/jinja/make_cases.py

The clock of strftime_now is fixed at 2025-07-09 14:05:03."""
import copy
import datetime
import json
import os
import re

import transformers.utils.chat_template_utils as ctu


class FixedClock:
    @classmethod
    def now(cls):
        return datetime.datetime(2025, 7, 9, 14, 5, 3)


ctu.datetime = FixedClock

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather — \"now\" & <here>",
     "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City, e.g. Zürich"},
      "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern", "n": 2.5, "ok": True,
        "none": None, "list": [1, "é"]}}}
CONVERSATION = [
    {"role": "system", "content": "  You are a pirate.\n"},
    {"role": "user", "content": "Hi <b>\"there\"</b> 日本語 😀"},
    {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nYo!", "reasoning_content": "hmm"},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "{\"temp\": 21.5}", "tool_call_id": "c1"},
    {"role": "tool", "content": "rain", "tool_call_id": "c2"},
    {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}, {"type": "text", "text": " two"}]},
]
BASE = {"bos_token": "<s>", "eos_token": "</s>", "messages": CONVERSATION, "tools": TOOLS, "add_generation_prompt": True}
V = {"x": 3, "f": 2.5, "s": "Héllo Wörld", "l": [1, 2, 3], "d": {"a": 1, "b": {"c": [1, 2]}, "items": 7}, "n": None, "t": True,
     "e": [], "es": "", "u": "日本語ß", "q": "it's \"q\"", "msgs": [{"role": "user", "content": "hi"},
     {"role": "assistant", "content": "  yo "}, {"role": "user", "content": "x", "tool_calls": [{"f": 1}]}]}

cases = []


def add(name, template, variables):
    case = {"name": name, "template": template, "vars": variables}
    case["text"] = ctu._cached_compile_jinja_template(template).render(**copy.deepcopy(variables))
    cases.append(case)


def fails(name, template, words, variables=V):
    try:
        ctu._cached_compile_jinja_template(template).render(**copy.deepcopy(variables))
    except Exception:
        cases.append({"name": name, "template": template, "vars": variables, "error": words})
        return
    raise SystemExit(f"{name}: Python renders it")


def refused(name, template, words):
    cases.append({"name": name, "template": template, "vars": V, "error": words})


here = os.path.dirname(os.path.abspath(__file__))
for path in sorted(os.listdir(here)):
    if path.endswith(".jinja"):
        text = open(os.path.join(here, path), encoding="utf-8", newline="").read()
        name = path[:-6]
        add(name, text, BASE)
        add(name + " without tools", text, {**BASE, "tools": None, "messages": CONVERSATION[:2]})
        add(name + " thinking off", text, {**BASE, "enable_thinking": False, "messages": CONVERSATION[:4]})
        add(name + " no generation prompt", text, {**BASE, "enable_thinking": True, "add_generation_prompt": False})

# Each line of expressions.txt is one template of expressions separated by " ;; ".
for number, line in enumerate(open(os.path.join(here, "expressions.txt"), encoding="utf-8").read().split("\n"), 1):
    if line and not line.startswith("#"):
        add(f"expressions.txt:{number}", "".join("[{{ " + e + " }}]" for e in line.split(" ;; ")), V)

# Each paragraph of statements.txt is a template, "===" between them; \r, \t and \f are written so.
for number, text in enumerate(open(os.path.join(here, "statements.txt"), encoding="utf-8").read().split("\n===\n"), 1):
    for mark, character in (("\\r", "\r"), ("\\t", "\t"), ("\\f", "\f")):
        text = text.replace(mark, character)
    add(f"statements.txt:{number}", text, V)

for number, line in enumerate(open(os.path.join(here, "errors.txt"), encoding="utf-8").read().split("\n"), 1):
    if line and not line.startswith("#"):
        kind, template, words = re.split(r" +;; +", line)
        template = template.replace("\\n", "\n")
        (fails if kind == "fails" else refused)(f"errors.txt:{number}", template, words)

with open(os.path.join(here, "cases.json"), "w", encoding="utf-8") as out:
    json.dump(cases, out, ensure_ascii=False, indent=0)
    out.write("\n")
print(len(cases), "cases")
