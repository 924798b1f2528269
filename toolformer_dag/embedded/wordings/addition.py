"""Stories that add."""

from toolformer_dag.embedded.wordings.scheme import Scheme

ADDITION = (
    Scheme(
        name="gain",
        operation="+",
        numbers="count",
        unit="{it}",
        setups=(
            "{n} had {a} {it}. Then {m} gave {n} {b} more",
            "{n} had {a} {it} and got another {b} from {m}",
            "{n} bought {a} {it}. Later {n} found {b} more",
            "On {day} {n} picked up {a} {it}, and on {other} {b} more",
            "{n} already owned {a} {it} when {m} brought {b} extra {it}",
            "{n} won {a} {it} at the {event} and {b} {it} at school",
            "After the {event} in {t}, {n} kept {a} {it}. {m} then added {b}",
        ),
        endings=(
            ". So in total {n} has",
            ". Now {n} has altogether",
            ", which makes a total of",
            ", so together that is",
            ". The sum of it all is",
        ),
        questions=(
            "How many {it} does {n} have now?",
            "How many {it} does {n} have in total?",
            "How many {it} is that altogether?",
            "What is the total?",
        ),
    ),
    Scheme(
        name="groups",
        operation="+",
        numbers="count",
        unit="{it}",
        setups=(
            "There were {a} {it} in the first {box} and {b} {it} in the second",
            "The {box} at the door holds {a} {it} and the {box} at the window holds {b}",
            "{n} collected {a} {it} and {m} collected {b} {it}",
            "{n} counted {a} {it} on {day} and another {b} on {other}",
            "A shop in {t} ordered {a} {it}, and a shop in {u} ordered {b} {it}",
            "The club of {t} sent {a} {it} and the club of {u} sent {b}",
        ),
        endings=(". Altogether there were", ". The total number is", ", so in all that is", ". Both together make"),
        questions=(
            "How many {it} are there in all?",
            "How many {it} is that in total?",
            "What is the total number of {it}?",
            "How many {it} were there altogether?",
        ),
    ),
    Scheme(
        name="bill",
        operation="+",
        numbers="money",
        unit="dollars",
        setups=(
            "{n} paid {a} dollars for the {it} and {b} dollars for the {box}",
            "The {box} costs {a} dollars and the {it} cost {b} dollars",
            "A ticket for the {event} is {a} dollars, and the bus to {t} is another {b} dollars",
            "{n} gave {a} dollars for the {event}, and {m} gave {b} dollars",
            "Lunch in {t} cost {a} dollars and dinner cost {b} dollars",
        ),
        endings=(". The total price is", ". Altogether that makes", ", so the sum to be paid is", ", in total"),
        questions=("What is the total price?", "How many dollars is that in total?", "How much is that altogether?"),
    ),
    Scheme(
        name="journey",
        operation="+",
        numbers="distance",
        unit="miles",
        setups=(
            "From {t} to {u} it is {a} miles, and from {u} to {w} another {b} miles",
            "{n} travelled {a} miles to {t} and then {b} miles more to {u}",
            "The train runs {a} miles to {t}. The bus goes on for {b} miles to {u}",
            "On {day} {n} walked {a} miles, and on {other} {b} miles",
        ),
        endings=(". The whole way is", ". In total that is", ", so the trip is altogether", ". The sum is"),
        questions=(
            "How long is the whole trip?",
            "How many miles is that in total?",
            "How many miles are that in all?",
        ),
    ),
)
UNSEEN_ADDITION = (
    Scheme(
        name="gain",
        operation="+",
        numbers="count",
        unit="{it}",
        setups=(
            "To the {a} {it} of {n} we have to add the {b} {it} of {m}",
            "With {b} more {it} on top of the {a} from {day}, the {box} was full",
        ),
        endings=(". Put together, they come to", ". All in all, count"),
        questions=("Put together, how many {it} are these?", "What number of {it} do we reach altogether?"),
    ),
    Scheme(
        name="bill",
        operation="+",
        numbers="money",
        unit="dollars",
        setups=("First came the {it}, for {a} dollars, then the way home from {t}, for {b} dollars more",),
        endings=(". The total on the bill reads", ". Add the two and you get"),
        questions=("What total stands on the bill?", "What do the two add up to?"),
    ),
    Scheme(
        name="journey",
        operation="+",
        numbers="distance",
        unit="miles",
        setups=(
            "{t} lies {a} miles behind us and {u} another {b} miles ahead",
            "After {a} miles the horse was tired, and yet it went {b} miles more",
        ),
        endings=(". Both ways together have", ". Altogether we count"),
        questions=("Both ways together have how many miles?",),
    ),
)
