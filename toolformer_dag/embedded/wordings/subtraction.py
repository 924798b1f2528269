"""Stories that take away."""

from toolformer_dag.embedded.wordings.scheme import Scheme

SUBTRACTION = (
    Scheme(
        name="loss",
        operation="-",
        numbers="count",
        unit="{it}",
        setups=(
            "{n} had {a} {it} and gave {b} of them to {m}",
            "{n} owned {a} {it}. On {day} {n} lost {b}",
            "{n} made {a} {it}. Then {m} took {b} away",
            "{n} carried {a} {it} to {t}, but {b} of them fell into the water",
            "From the {a} {it} in the {box}, {n} used {b}",
            "{n} had {a} {it} before the {event} and sold {b} there",
            "{n} found {a} {it} and threw away {b} of them",
        ),
        endings=(
            ". Now {n} has only",
            ". What is left is",
            ", so the rest is",
            ". The number left is",
            ", which leaves",
        ),
        questions=(
            "How many {it} are left?",
            "How many {it} remain?",
            "How many {it} does {n} still have?",
            "How many are left over?",
        ),
    ),
    Scheme(
        name="stock",
        operation="-",
        numbers="count",
        unit="{it}",
        setups=(
            "There were {a} {it} in the {box}, but {b} of them were broken",
            "The shop had {a} {it} and sold {b} on {day}",
            "A farmer near {t} stored {a} {it}. In the winter {b} were eaten",
            "Of the {a} {it} at the {event}, {b} were given away",
            "The school in {t} kept {a} {it} and lost {b} in the fire",
            "{a} {it} were ordered for the {event}. On {day}, {b} had gone",
        ),
        endings=(". What remains is", ". Now there are still", ", so the number left is", ", which leaves"),
        questions=(
            "How many {it} are left?",
            "How many {it} remain?",
            "How many {it} are there still?",
            "What is the number left?",
        ),
    ),
    Scheme(
        name="change",
        operation="-",
        numbers="money",
        unit="dollars",
        setups=(
            "{n} had {a} dollars and spent {b} dollars on {it}",
            "The {box} used to cost {a} dollars, but now the price is lower by {b} dollars",
            "{n} took {a} dollars to the {event} and paid {b} dollars for {it}",
            "From {a} dollars of savings, {n} gave {b} dollars to {m}",
        ),
        endings=(". What is left is", ". That leaves", ", so the rest is", ". Now there remain"),
        questions=("How many dollars are left?", "How much money is left?", "What remains?"),
    ),
    Scheme(
        name="difference",
        operation="-",
        numbers="distance",
        unit="miles",
        setups=(
            "It is {a} miles to {t} and only {b} miles to {u}",
            "The road to {t} is {a} miles long, the path to {u} only {b} miles",
            "Of the {a} miles to {t}, {n} has already walked {b}",
            "{n} rode {a} miles on {day} and {m} only {b} miles",
        ),
        endings=(". The difference is", ". What remains between the two is", ", a difference of", ", so the rest is"),
        questions=("What is the difference?", "How many miles is the difference?", "How many miles remain?"),
    ),
)
UNSEEN_SUBTRACTION = (
    Scheme(
        name="loss",
        operation="-",
        numbers="count",
        unit="{it}",
        setups=(
            "Once {b} had been taken from the {a} {it} that {n} keeps",
            "Without the {b} that {m} lost, the {a} {it} of {n} would have lasted",
        ),
        endings=(", what remained was", ", so {n} is left with"),
        questions=("How many {it} remained with {n}?", "With how many {it} is {n} left?"),
    ),
    Scheme(
        name="change",
        operation="-",
        numbers="money",
        unit="dollars",
        setups=("A note of {a} dollars lay on the table, and {b} dollars of it went to the baker",),
        endings=(". The rest that {n} put back is", ". Back in the pocket goes what is left,"),
        questions=("What rest did {n} put back?", "How much went back, being left over?"),
    ),
    Scheme(
        name="difference",
        operation="-",
        numbers="distance",
        unit="miles",
        setups=(
            "Whoever goes to {t} has {a} miles to go, whoever goes to {u} has just {b}",
            "A walk of {a} miles is longer than one of {b} miles",
        ),
        endings=(". They differ by", ". One exceeds the other by"),
        questions=("By how many miles do they differ?",),
    ),
)
