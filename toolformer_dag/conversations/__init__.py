"""Read recorded conversations with tool calls in the forms in which they are stored, and drop calls from them.

1. `forms/` declares each form: the fields by which it is recognised, where its messages are, an example.
2. `shapes.py` names the fields of calls, results and ids, whatever the form.
3. `raw_messages.py` splits stored messages into words, calls and results.
4. `marks.py` finds calls and results in texts, for conversations without fields for them.
5. `pairing.py` pairs every result with its call.
6. `reading.py` does all of this for the records of a file; `dropping.py` drops calls from a record.
"""
