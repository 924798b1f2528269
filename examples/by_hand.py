"""Toolformer on one text, step by step: `python examples/by_hand.py`. `toolformer-dag run` does it with a corpus."""

from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import Call, MalformedCall, PlacedCall, format_call, parse_call, splice
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import ToolCall

TEXT = "The train was late. The farm had 137 hens and bought 48 more, so in total there were 185 hens. It rained."
# The paper's names and defaults, but for tau_s: this model is small.
TAU_S = 0.02
K = 3
M = 5
TAU_F = 1.0

engine = Engine(load_model(ModelSettings(name="embedded", dtype="float32")))
tool = load_tool("calculator", {"prompt": "embedded"})
print(f"1. A text x:\n{TEXT}")

# The prompt P(x) shows the model texts with calls. p_i is how likely it begins a call before token x_i; at the K
# likeliest places above TAU_S it writes M calls each.
sampling = SamplingSettings(max_call_tokens=32)
request = ProposalRequest(TEXT, digest=TEXT)  # the digest is the seed of the draws
[proposal] = engine.propose(tool.prompt, [request], tau_s=TAU_S, k=K, m=M, sampling=sampling)
print(f"\n2. Positions where p_i > {TAU_S}, and what is sampled there:")
calls: dict[tuple[int, Call], None] = {}  # in order, each once
for sample in proposal.samples:
    offset = proposal.offsets[sample.position]
    p = proposal.probabilities[sample.position]
    print(f"p = {p:.2f} before {TEXT[offset : offset + 12]!r}: {sample.body}")
    try:
        calls[sample.position, parse_call(sample.body or "")] = None
    except MalformedCall as error:
        print(f"  no call: {error}")

print("\n3. The tool answers each distinct call:")
answers = run_calls(tool, [ToolCall(call.input) for _, call in calls], ToolLimits())
for (_, call), answer in zip(calls, answers, strict=True):
    print(f"{call.input} -> {answer.result or answer.reason}")

print("\n4. Three losses of what follows (nats): without a call, with the call, with call and result:")
answered = [(i, call, one.result) for (i, call), one in zip(calls, answers, strict=True) if one.result]
losses = engine.losses([LossRequest(TEXT, i, call.tool, call.input, result) for i, call, result in answered])
for (_, call, result), loss in zip(answered, losses, strict=True):
    three = f"{loss.loss_empty:.2f}, {loss.loss_call:.2f}, {loss.loss_result:.2f}"
    print(f"{format_call(call, result).strip()}: {three}; delta = min(first two) - third = {loss.delta:.2f}")

print(f"\n5. The filter keeps, at each position, the best call whose delta is at least {TAU_F}:")
best: dict[int, tuple[float, PlacedCall]] = {}
for (i, call, result), loss in zip(answered, losses, strict=True):
    if loss.delta >= TAU_F and loss.delta > best.get(i, (0.0,))[0]:
        best[i] = loss.delta, PlacedCall(int(proposal.offsets[i]), call, result)
print(splice(TEXT, [placed for _, placed in best.values()]))
