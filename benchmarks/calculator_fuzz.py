"""Time the calculator on a million inputs; none may raise.

    python -m benchmarks.calculator_fuzz [COUNT] [SEED]

The inputs are, a quarter each: expressions of the grammar, expressions with changed characters, deep parentheses,
random characters. Prints the rate, the slowest inputs (CPU time; the best of five repetitions in brackets) and counts
by outcome.
"""

import random
import sys
import time
from collections import Counter
from heapq import nlargest

from toolformer_dag.tools.built_in.calculator import NoResult, evaluate

CHARACTERS = "0123456789.,+-−–*/x×·÷()% \t=^e$\"'\n\x00é"
OPERATORS = [" + ", "-", " * ", " / ", "x", "×", "÷", " − ", "·", "+"]


def expression(dice: random.Random, depth: int) -> str:
    if depth == 0 or dice.random() < 0.3:
        number = dice.choice(
            [dice.randrange(100), dice.randrange(10**9), round(dice.uniform(0, 10**4), dice.randrange(6))]
        )
        return f"{number:,}" + "%" * (dice.random() < 0.1)
    inner = expression(dice, depth - 1) + dice.choice(OPERATORS) + expression(dice, depth - 1)
    return dice.choice([inner, f"({inner})", f"-({inner})"])


def changed(dice: random.Random, text: str) -> str:
    characters = list(text)
    for _ in range(dice.randrange(1, 4)):
        characters[dice.randrange(len(characters))] = dice.choice(CHARACTERS)
    return "".join(characters)


def draw(dice: random.Random) -> str:
    kind = dice.randrange(4)
    if kind == 2:
        return "".join(dice.choices(CHARACTERS, k=dice.randrange(40)))
    if kind == 3:
        return "(" * dice.randrange(60) + "1" + ")" * dice.randrange(60)
    text = expression(dice, dice.randrange(6))
    return text if kind == 0 else changed(dice, text)


def outcome(text: str) -> str:
    try:
        evaluate(text)
    except NoResult as error:
        return error.reason
    return "result"


def timed(text: str) -> float:
    start = time.thread_time()
    outcome(text)
    return time.thread_time() - start


def main(count: int, seed: int) -> None:
    dice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    seconds = 0.0
    for _ in range(count // 10_000):
        inputs = [draw(dice) for _ in range(10_000)]
        times = [timed(text) for text in inputs]
        outcomes.update(map(outcome, inputs))
        seconds += sum(times)
        slowest = nlargest(5, [*slowest, *zip(times, inputs, strict=True)])
    print(f"{sum(outcomes.values()):,} inputs, {count / seconds:,.0f} per CPU-second, none raised")
    for first, text in slowest:
        again = min(timed(text) for _ in range(5))
        print(f"slowest {first * 1e3:.3f} ms ({again * 1e3:.3f} ms): {text[:60]!r}, {len(text)} characters")
    for reason, number in outcomes.most_common():
        print(f"{reason:17} {number:9,} {number / count:7.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
