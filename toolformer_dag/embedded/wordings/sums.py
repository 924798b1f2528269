"""Stories in which a number has to be worked out; setups, endings and questions of a scheme combine freely."""

from toolformer_dag.embedded.wordings.scheme import Scheme
from toolformer_dag.embedded.wordings.word_list import spaced

SCHEMES = (
    Scheme(
        name="gain",
        operation="+",
        numbers="count",
        unit="{it}",
        setups=(
            "{n} had {a} {it}. Then {m} gave {n} {b} more",
            "{n} collected {a} {it} in the morning and {b} {it} in the evening",
            "There were {a} {it} in the first {box} and {b} {it} in the second",
            "{n} counted {a} {it} on {day} and another {b} on {other}",
            "{n} bought {a} {it}. Later {n} found {b} more",
        ),
        endings=(". So in total there were", ". Altogether that makes", ". The total is", ", so in all that is"),
        questions=("How many {it} is that in total?", "How many {it} are there in all?", "What is the total?"),
    ),
    Scheme(
        name="loss",
        operation="-",
        numbers="count",
        unit="{it}",
        setups=(
            "{n} had {a} {it} and gave {b} of them to {m}",
            "There were {a} {it} in the {box}, but {b} of them were broken",
            "{n} owned {a} {it}. On {day} {n} lost {b}",
            "The shop had {a} {it} and sold {b} on {day}",
            "{n} made {a} {it}. Then {m} took {b} away",
        ),
        endings=(". Now there are", ". What is left is", ", so the rest is", ". The number left is"),
        questions=("How many {it} are left?", "How many {it} remain?", "How many are left over?"),
    ),
    Scheme(
        name="rows",
        operation="*",
        numbers="rate",
        unit="{it}",
        setups=(
            "{n} has {a} boxes with {b} {it} in each",
            "Each of the {a} workers made {b} {it}",
            "There are {a} shelves, and each shelf holds {b} {it}",
            "For {a} days {n} sold {b} {it} every day",
        ),
        endings=(", so the total is", ". That makes", ". In all that is", ". The product is"),
        questions=("How many {it} is that?", "How many {it} are there in all?", "What is the total?"),
    ),
    Scheme(
        name="share",
        operation="/",
        numbers="share",
        unit="{it}",
        setups=(
            "{n} divided {a} {it} equally among {b} friends",
            "The {a} {it} were shared by {b} children",
            "{n} packed {a} {it} into {b} boxes, the same number in each",
        ),
        endings=(", so each is", ". Per one that is", ", which means for each", ", an average of"),
        questions=("How many is that for each?", "What is the average?", "How many {it} per one?"),
    ),
)
UNSEEN_SCHEMES = (
    Scheme(
        name="gain",
        operation="+",
        numbers="count",
        unit="{it}",
        setups=("To the {a} {it} of {n} one has to add the {b} of {m}",),
        endings=(". Put together, they come to",),
        questions=("What do they come to?",),
    ),
    Scheme(
        name="loss",
        operation="-",
        numbers="count",
        unit="{it}",
        setups=("Of the {a} {it} that {n} brought along, only {b} were eaten",),
        endings=(". {n} carried home",),
        questions=("How many {it} did {n} carry home?",),
    ),
    Scheme(
        name="rows",
        operation="*",
        numbers="rate",
        unit="{it}",
        setups=("Fill {a} baskets, {b} {it} a basket",),
        endings=(", and you will need",),
        questions=("How many {it} will you need?",),
    ),
    Scheme(
        name="share",
        operation="/",
        numbers="share",
        unit="{it}",
        setups=("If {a} {it} must do for {b} guests",),
        endings=(", a guest may take",),
        questions=("How many {it} may a guest take?",),
    ),
)
THINGS = spaced(
    "apples pens books coins stamps cards eggs shells stickers marbles oranges tickets bottles chairs "
    "boxes flowers cookies photos stones candles pears nuts bricks letters plates cups ropes lamps"
)
CONTAINERS = spaced("box bag jar basket drawer shelf case room")
EVENTS = spaced("concert fair market show match lecture parade exhibition")
TAILS = (".", ".", " {unit}.", " {unit} in all.")
