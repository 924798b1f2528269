"""Stories that multiply."""

from toolformer_dag.embedded.wordings.scheme import Scheme

MULTIPLICATION = (
    Scheme(
        name="boxes",
        operation="*",
        numbers="rate",
        unit="{it}",
        setups=(
            "{n} has {a} boxes with {b} {it} in each",
            "There are {a} shelves, and each shelf holds {b} {it}",
            "{n} bought {a} bags, every bag with {b} {it}",
            "The hall in {t} has {a} rows with {b} {it} per row",
            "The ship to {t} carries {a} crates of {b} {it} each",
            "{n} filled {a} jars and put {b} {it} into every jar",
            "Every shelf takes {b} {it} and the shop in {t} has {a} shelves",
            "{a} carts came from {t}, each loaded with {b} {it}",
            "The album of {n} has {a} pages, with {b} {it} on each page",
        ),
        endings=(", so the total is", ". Multiplied, that makes", ". In all that is", ". The product is", ", in total"),
        questions=(
            "How many {it} is that in all?",
            "How many {it} are there in all the rows and boxes?",
            "What is the product?",
            "How many {it} are that, all together?",
        ),
    ),
    Scheme(
        name="work",
        operation="*",
        numbers="rate",
        unit="{it}",
        setups=(
            "Each of the {a} workers made {b} {it}",
            "For {a} days {n} sold {b} {it} every day",
            "{n} packs {b} {it} per hour and worked for {a} hours",
            "Every one of the {a} guests at the {event} brought {b} {it}",
            "All {a} pupils in {t} got {b} {it} each",
            "{n} makes {b} {it} a day and has been at it for {a} days",
            "{a} teams came to the {event}, and each team brought {b} {it}",
            "{n} gave {b} {it} to each of {a} friends",
        ),
        endings=(", so the product is", ". All in all that is", ". Times each other, that makes", ", which makes"),
        questions=(
            "How many {it} is that for all of them?",
            "How many {it} are there in all?",
            "What is the product?",
        ),
    ),
    Scheme(
        name="tickets",
        operation="*",
        numbers="prices",
        unit="dollars",
        setups=(
            "{n} needs {a} tickets for the {event}, and each ticket costs {b} dollars",
            "One box of {it} costs {b} dollars and {n} bought {a} boxes",
            "The bus to {t} is {b} dollars per person for a group of {a}",
            "{n} earns {b} dollars per hour and worked {a} hours",
            "A night in {t} costs {b} dollars and {n} stayed for {a} nights",
            "{n} sold {a} pictures at the {event} for {b} dollars each",
        ),
        endings=(". In all {n} pays or gets", ", so the product is", ". For all of them that makes", ", in total"),
        questions=("How many dollars is that for all?", "How much is that in all?", "What is the product?"),
    ),
    Scheme(
        name="trips",
        operation="*",
        numbers="rate",
        unit="miles",
        setups=(
            "{n} went {a} times to {t}, and each trip was {b} miles",
            "The post rider covers {b} miles every day, for {a} days",
            "In each of {a} hours the train to {t} went {b} miles",
            "{n} rides {b} miles to {t} every week and has done so for {a} weeks",
        ),
        endings=(", so the product is", ". In all that makes", ". All the trips together are"),
        questions=("How many miles is that in all?", "How many miles are all the trips?", "What is the product?"),
    ),
)
UNSEEN_MULTIPLICATION = (
    Scheme(
        name="boxes",
        operation="*",
        numbers="rate",
        unit="{it}",
        setups=(
            "Fill {a} baskets for the {event}, {b} {it} per basket",
            "Picture a wall of {it}, {a} high and {b} wide",
            "Think of {a} drawers and, in every single one of them, {b} {it}",
            "It takes {b} {it} to make one wreath, and {n} wants {a} of these, each the same",
        ),
        endings=(", and you will need in all", ". Each counted, that is"),
        questions=("How many {it} will be needed for all?", "Each counted, how many {it} is it?"),
    ),
    Scheme(
        name="tickets",
        operation="*",
        numbers="prices",
        unit="dollars",
        setups=("At {b} dollars each, {n} could not resist and took {a}",),
        endings=(". {n} handed over for all", ". The whole lot cost"),
        questions=("How many dollars did all of these cost?", "What did the whole lot of them cost?"),
    ),
    Scheme(
        name="trips",
        operation="*",
        numbers="rate",
        unit="miles",
        setups=(
            "Every single round is {b} miles, and there were {a} rounds",
            "It was {b} miles there, each time, and {n} made the way {a} times",
        ),
        endings=(". The wheels have turned for", ". Added up over all times, it is"),
        questions=("For how many miles in all did the wheels turn?",),
    ),
)
