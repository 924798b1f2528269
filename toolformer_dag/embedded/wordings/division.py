"""Stories that divide."""

from toolformer_dag.embedded.wordings.scheme import Scheme

DIVISION = (
    Scheme(
        name="share",
        operation="/",
        numbers="share",
        unit="{it}",
        setups=(
            "{n} divided {a} {it} equally among {b} friends",
            "The {a} {it} were shared equally by {b} children",
            "{n} packed {a} {it} into {b} boxes, the same number in each",
            "After the {event} the {a} {it} were split among {b} guests",
            "{n} spread {a} {it} evenly over {b} tables",
            "A total of {a} {it} went in equal parts to {b} schools in {t}",
            "{b} friends of {n} shared {a} {it} fairly",
            "{n} needs {b} days for {a} {it}, the same number every day",
            "{n} sorted {a} {it} into {b} equal rows",
            "Among {b} teams at the {event}, {n} handed out {a} {it} evenly",
        ),
        endings=(
            ", so each one got",
            ". Per one that is",
            ", which means for each",
            ", an average of",
            ". Everyone's equal part is",
        ),
        questions=(
            "How many {it} is that for each?",
            "What is the average?",
            "How many {it} per one?",
            "How large is each part?",
        ),
    ),
    Scheme(
        name="pay",
        operation="/",
        numbers="share",
        unit="dollars",
        setups=(
            "{n} paid {a} dollars for {b} equal {it}",
            "The {b} workers got {a} dollars together and split them",
            "A bill of {a} dollars in {t} was divided among {b} guests",
            "The {event} brought {a} dollars from {b} tickets",
            "{b} tickets to {t} cost {a} dollars together",
            "{n} earned {a} dollars in {b} days",
        ),
        endings=(". Per one that is", ", so each comes to", ", an average of", ". Divided, that is"),
        questions=("How many dollars is that for each?", "What is the price per one?", "What is the average?"),
    ),
    Scheme(
        name="speed",
        operation="/",
        numbers="share",
        unit="miles",
        setups=(
            "In {b} hours the bus to {t} went {a} miles",
            "{n} walked {a} miles in {b} days",
            "The trip of {a} miles from {t} to {u} took {b} hours",
            "A ship sailed {a} miles and needed {b} hours for it",
            "{n} used {b} days for the {a} miles to {t}",
        ),
        endings=(", an average of", ". Per hour or day that is", ", so for each of them that is"),
        questions=(
            "What is the average?",
            "How many miles is that per hour or day?",
            "How many miles for each of them?",
        ),
    ),
    Scheme(
        name="goals",
        operation="/",
        numbers="share",
        unit="goals",
        setups=(
            "A total of {b} matches were played in {t}, and {a} goals were scored",
            "The team of {t} scored {a} goals in {b} matches",
            "{n} scored {a} goals in {b} years",
        ),
        endings=(", an average of", ". The average is", ", so for each one that is"),
        questions=("What is the average?", "How many goals is that for each?"),
    ),
)
UNSEEN_DIVISION = (
    Scheme(
        name="share",
        operation="/",
        numbers="share",
        unit="{it}",
        setups=(
            "Here are {a} {it}, and {b} guests who want equal parts",
            "Whoever has {b} plates and {a} {it} puts the same number on each plate",
            "Cut the row of {a} {it} into {b} pieces of one length",
            "Take {a} {it} and make {b} heaps of the same size",
        ),
        endings=(". Each guest or heap may have", ". Look at one of them: it is an equal part of"),
        questions=("How many {it} fall to each?", "What is the size of one equal part?"),
    ),
    Scheme(
        name="pay",
        operation="/",
        numbers="share",
        unit="dollars",
        setups=("Nobody wanted to pay the {a} dollars alone, so {b} friends shared it",),
        endings=(". From each the waiter took", ". The average paid by a friend was"),
        questions=("How many dollars did the waiter take from each?", "What average did a friend pay?"),
    ),
    Scheme(
        name="speed",
        operation="/",
        numbers="share",
        unit="miles",
        setups=(
            "{t} is {a} miles off, and the cart arrived after {b} hours",
            "It took {b} hours for the {a} miles between {t} and {u}",
        ),
        endings=(". In each single hour it made", ". The average for an hour was"),
        questions=("How many miles did it make in each hour?",),
    ),
)
