"""Decoding with tools: the model calls a tool inside a sentence and continues (paper, sections 2 and 4.2).

A text is written in five steps. `generate` in greedy.py has them in code; `serving/` takes the same steps for texts
that come and go:

1. Prefill: the tokens so far run through the model, many texts in a batch (`Backend.start_greedy_rows`).
2. Choose: each text gets the likeliest token that no rule forbids (token_choice.py; the rules are in rules.py, what
   they forbid is in text_since_call.py). Where ` [` is among the k likeliest tokens, a call begins.
3. Write a call: after ` [`, only tokens that can become `Name(input) ->` are chosen (written_call.py).
4. Wait for its tool: the text leaves its batch, and the call runs (open_calls.py).
5. Go on: the call with its result becomes part of the text, which is prefilled again.

written_text.py has the states of a text during these steps, and what leads from one to the next. A text is stored in
two parts: finished_text.py has all up to the last call, text_since_call.py the tokens after it. What later tokens have
to know of earlier calls is in text_memory.py.
"""
