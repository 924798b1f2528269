"""The forms of stored conversations, by family, in the order in which they are tried for a record."""

from toolformer_dag.conversations.forms import (
    agent_logs,
    autogen,
    benchmarks,
    coding_agents,
    envelopes,
    payloads,
    sessions,
    training_sets,
)
from toolformer_dag.conversations.forms.form import Form

ALL_FORMS: tuple[Form, ...] = (
    *sessions.FORMS,
    *coding_agents.FORMS,
    *agent_logs.FORMS,
    *autogen.FORMS,
    *benchmarks.FORMS,
    *envelopes.FORMS,
    *payloads.FORMS,
    *training_sets.FORMS,
    *payloads.GENERAL_FORMS,
)
RECORD_FORMS = tuple(form for form in ALL_FORMS if not form.is_file)
FILE_FORMS = tuple(form for form in ALL_FORMS if form.is_file)
