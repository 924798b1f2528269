"""Train a tiny policy with the gain of tool calls as its only reward: `python examples/reward.py` (needs trl).

The policy answers a question with one word, which stands for what an agent does: the fitting call, the same call with a
wrong value, a call that the answer does not need, or no call. Nothing tells it which is best: only the gain does.
"""

import argparse
import json
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from toolformer_dag.rewards import gain
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judge import Judge

STEPS = 20
QUESTIONS = 8
EACH = 8
ACTS = ("right", "wrong", "needless", "none")


def call(tool: str, arguments: dict[str, Any], result: str) -> list[dict[str, Any]]:
    """Return a call and its result in OpenAI's form."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    tool_call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    return [message, {"role": "tool", "tool_call_id": "c", "content": result}]


def questions() -> list[dict[str, Any]]:
    """Return questions with their known answers, what each act comes to, and other questions' results to swap."""
    numbers = [(112 + 97 * n, 13 + 11 * n) for n in range(QUESTIONS)]
    products = [str(a * b) for a, b in numbers]
    rows = []
    for n, (a, b) in enumerate(numbers):
        arguments = {"expression": f"{a} * {b}"}
        others = [products[(n + step) % QUESTIONS] for step in (1, 3)]
        weather = call("weather", {"town": "Graz"}, '{"temperature": 17, "sky": "fog"}')
        acts = {
            "right": call("calculator", arguments, products[n]),
            "wrong": call("calculator", arguments, str(a * b + 3 * a)),
            "needless": weather,
            "none": [],
        }
        question = f"We need {a} boxes of {b} pieces. How many pieces is that?"
        answer = f"That makes {products[n]} pieces."
        swapped = {
            act: others if act != "needless" else ['{"temperature": 3, "sky": "hail"}', "31, sun"] for act in ACTS
        }
        rows.append({"question": question, "answer": answer, "acts": acts, "swapped": swapped})
    return rows


def policy() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a random model of four words and the numbers of the questions."""
    words = ["<pad>", "<eos>", *ACTS, *map(str, range(QUESTIONS))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), **sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    return LlamaForCausalLM(config), fast


def shares(model: LlamaForCausalLM) -> dict[str, float]:
    """Return how likely the policy is to do what, over all questions."""
    with torch.no_grad():
        ids = torch.arange(2 + len(ACTS), 2 + len(ACTS) + QUESTIONS, device=model.device)[:, None]
        odds = torch.softmax(model(ids).logits[:, -1, 2 : 2 + len(ACTS)].float(), -1).mean(0)
    return {act: round(float(share), 2) for act, share in zip(ACTS, odds, strict=True)}


class ActReward:
    """The reward of what the policy's words stand for: the gain of the calls, each judged once."""

    def __init__(self, questions: list[dict[str, Any]], judge: Judge) -> None:
        self.questions = questions
        self.judge = judge
        self.gain_of = dict[tuple[int, str], float | None]()  # by the number of a question and an act

    def gains(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """Return the reward of each completion. prompts: the numbers of the questions."""
        acts = [act if act in ACTS else "none" for act in completions]
        answered = list(zip(map(int, prompts), acts, strict=True))
        new = [pair for pair in dict.fromkeys(answered) if pair not in self.gain_of]
        self.gain_of.update(zip(new, self._judged(new), strict=True))
        return [self.gain_of[pair] for pair in answered]

    def _judged(self, answered: list[tuple[int, str]]) -> list[float | None]:
        """Return the gain of what each act comes to. answered: pairs of the number of a question and an act."""
        questions = [self.questions[number] for number, _ in answered]
        return gain(
            prompts=[question["question"] for question in questions],
            completions=[self.questions[number]["acts"][act] for number, act in answered],
            answer=[question["answer"] for question in questions],
            swapped_results=[self.questions[number]["swapped"][act] for number, act in answered],
            judge=self.judge,
        )


def main() -> None:
    """Show what each act earns, train, and show how likely each act is before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="the judge: a folder, a GGUF file or an id of the hub")
    settings = load_settings(overrides=[f"model.name={parser.parse_args().model}", "traces.window=answer"])
    judge = Judge(settings)
    reward = ActReward(questions(), judge)
    for act in ACTS:
        earned = reward.gains([str(n) for n in range(QUESTIONS)], [act] * QUESTIONS)
        print(f"{act}: {sum(value or 0.0 for value in earned) / QUESTIONS:+.2f} nats per token")
    model, tokenizer = policy()
    print("before:", shares(model))
    sizes = {"per_device_train_batch_size": EACH * 2, "num_generations": EACH, "max_completion_length": 1}
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    chosen = GRPOConfig("out-reward", max_steps=STEPS, learning_rate=3e-3, use_cpu=True, bf16=False, **sizes, **quiet)
    trainer = GRPOTrainer(
        model,
        reward.gains,
        chosen,
        Dataset.from_list([{"prompt": str(n)} for n in range(QUESTIONS)]),
        processing_class=tokenizer,
    )
    trainer.train()
    print("after:", shares(trainer.model))


if __name__ == "__main__":
    main()
