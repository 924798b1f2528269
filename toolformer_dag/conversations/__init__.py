"""Read recorded conversations with tool calls in the forms in which people store them, and drop calls from them again.

1. `forms/` declares each form: by which fields it is recognised, where its messages stand, an example.
2. `shapes.py` knows in which fields a call, a result and an id stand, whatever the form.
3. `raw_messages.py` takes a record apart into raw messages, and these into words, calls and results.
4. `marks.py` finds calls and results in text, for conversations that have no fields for them.
5. `pairing.py` gives every result to its call.
6. `reading.py` does all of this for the records of a file; `dropping.py` leaves calls out of a record again.
"""
