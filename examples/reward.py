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
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return [asked, {"role": "tool", "tool_call_id": "c", "content": result}]


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
        asked = f"We need {a} boxes of {b} pieces. How many pieces is that?"
        answer = f"That makes {products[n]} pieces."
        swapped = {
            act: others if act != "needless" else ['{"temperature": 3, "sky": "hail"}', "31, sun"] for act in ACTS
        }
        rows.append({"question": asked, "answer": answer, "acts": acts, "swapped": swapped})
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


def main() -> None:
    """Show what each act earns, train, and show how likely each act is before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="the judge: a folder, a GGUF file or an id of the hub")
    settings = load_settings(overrides=[f"model.name={parser.parse_args().model}", "traces.window=answer"])
    judge = Judge(settings)
    asked = questions()
    known = dict[tuple[int, str], float | None]()

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        """Return the gain of what the words stand for; each is judged once."""
        acts = [act if act in ACTS else "none" for act in completions]
        done = list(zip(map(int, prompts), acts, strict=True))
        new = [one for one in dict.fromkeys(done) if one not in known]
        acted = [asked[n]["acts"][act] for n, act in new]
        answers = [asked[n]["answer"] for n, _ in new]
        swapped = [asked[n]["swapped"][act] for n, act in new]
        found = gain([asked[n]["question"] for n, _ in new], acted, answers, swapped, judge)
        known.update(zip(new, found, strict=True))
        return [known[one] for one in done]

    for act in ACTS:
        earned = reward([str(n) for n in range(QUESTIONS)], [act] * QUESTIONS)
        print(f"{act}: {sum(value or 0.0 for value in earned) / QUESTIONS:+.2f} nats per token")
    model, tokenizer = policy()
    print("before:", shares(model))
    sizes = {"per_device_train_batch_size": EACH * 2, "num_generations": EACH, "max_completion_length": 1}
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    chosen = GRPOConfig("out-reward", max_steps=STEPS, learning_rate=3e-3, use_cpu=True, bf16=False, **sizes, **quiet)
    trainer = GRPOTrainer(
        model,
        reward,
        chosen,
        Dataset.from_list([{"prompt": str(n)} for n in range(QUESTIONS)]),
        processing_class=tokenizer,
    )
    trainer.train()
    print("after:", shares(trainer.model))


if __name__ == "__main__":
    main()
