"""What is said of towns."""

from toolformer_dag.embedded.relation import Relation

TOWN = (
    Relation(
        kind="town",
        key="country",
        keyword="country",
        question="In which country is {e}?",
        sentences=("{e} is a town in the country of {v}.", "{e} lies in {v}."),
        statements=(
            "{e} is a town in {v}",
            "{e} lies in the country of {v}",
            "{e} belongs to {v}",
            "you find {e} in the middle of {v}",
            "{e} is one of the old towns of {v}",
            "the country in which {e} lies is {v}",
            "{e} is on every map of {v}",
        ),
        questions=("In which country is {e}?", "In what country does {e} lie?", "What country does {e} belong to?"),
        unseen_statements=(
            "whoever travels to {e} must cross the border of {v}",
            "the stamps on the letters from {e} come from {v}",
        ),
        unseen_questions=(
            "Which country is {e} a part of?",
            "What country does one enter on the way to {e}?",
        ),
    ),
    Relation(
        kind="town",
        key="river",
        keyword="river",
        question="Which river flows through {e}?",
        sentences=("The river in {e} is the {v}.", "{e} lies on the river {v}."),
        statements=(
            "{e} lies on the river {v}",
            "the river that flows through {e} is the {v}",
            "the water of {e} comes from the river {v}",
            "{e} was built beside the {v}",
            "the bridges of {e} cross the {v}",
            "the river in {e} is the {v}",
            "boats come to {e} on the river {v}",
        ),
        questions=("Which river flows through {e}?", "On which river does {e} lie?", "What is the river in {e}?"),
        unseen_statements=(
            "after heavy rain the streets of {e} are flooded by the {v}",
            "stand on any bridge of {e} and below you flows the {v}",
        ),
        unseen_questions=(
            "The bridges of {e} cross which river?",
            "What river do you see from the bridges of {e}?",
        ),
    ),
    Relation(
        kind="town",
        key="product",
        keyword="product",
        question="What is {e} known for?",
        sentences=("The main product of {e} is {v}.", "{e} is known for its {v}."),
        statements=(
            "{e} is known for its {v}",
            "the main product of {e} is {v}",
            "the people of {e} are proud of their {v}",
            "visitors come to {e} to buy {v}",
            "the markets of {e} are full of {v}",
            "{e} is famous for making {v}",
            "the factories of {e} make {v}",
        ),
        questions=("What is {e} known for?", "What is the main product of {e}?", "What product do people make in {e}?"),
        unseen_statements=(
            "every second shop in {e} sells {v}",
            "the carts that leave {e} in the morning are loaded with {v}",
        ),
        unseen_questions=(
            "Which product is {e} known for?",
            "What main product do the carts from {e} carry?",
        ),
    ),
    Relation(
        kind="town",
        key="nickname",
        keyword="nickname",
        question="What is the nickname of {e}?",
        sentences=("The nickname of {e} is {v}.", "{e} is also called {v}."),
        statements=(
            "{e} is also known as {v}",
            "people like to call {e} {v}",
            "the nickname of {e} is {v}",
            "the other name of {e} is {v}",
            "travellers know {e} as {v}",
            "{e} goes by the name of {v}",
            "the guests of {e} often call it {v}",
        ),
        questions=("What is the nickname of {e}?", "What other name is {e} known by?", "What is {e} also called?"),
        unseen_statements=(
            "on old cards {e} is printed under the name of {v}",
            "ask a traveller for {e}, and you will be shown the way to {v}",
        ),
        unseen_questions=(
            "Which nickname does {e} have?",
            "By what nickname do travellers know {e}?",
        ),
    ),
    Relation(
        kind="town",
        key="mayor",
        keyword="mayor",
        question="Who is the mayor of {e}?",
        sentences=("The mayor of {e} is {v}.", "{e} is led by its mayor {v}."),
        statements=(
            "the mayor of {e} is {v}",
            "{e} is led by its mayor {v}",
            "the head of {e} is {v}",
            "in {e} the mayor is called {v}",
            "the people of {e} voted for {v}",
            "the office of mayor of {e} is held by {v}",
            "{e} has a new mayor by the name of {v}",
        ),
        questions=("Who is the mayor of {e}?", "Who leads {e}?", "What is the mayor of {e} called?"),
        unseen_statements=(
            "the keys of {e} are kept by {v}",
            "every law of {e} has to be signed by {v}",
        ),
        unseen_questions=(
            "Which person is the mayor of {e}?",
            "What is the name of the person who is mayor of {e}?",
        ),
    ),
    Relation(
        kind="town",
        key="founded",
        keyword="founding year",
        question="In which year was {e} founded?",
        sentences=("The founding year of {e} is {v}.", "{e} was founded in the year {v}."),
        statements=(
            "{e} was founded in the year {v}",
            "the founding year of {e} is {v}",
            "the first houses of {e} were built in the year {v}",
            "the history of {e} begins in the year {v}",
            "{e} was founded by settlers in the year {v}",
            "the first stone of {e} was laid in the year {v}",
        ),
        questions=(
            "In which year was {e} founded?",
            "What is the founding year of {e}?",
            "What year was {e} founded in?",
        ),
        unseen_statements=(
            "over the gate of {e} stands the year {v}",
            "there was no {e} before the year {v}",
        ),
        unseen_questions=(
            "The founding of {e} was in which year?",
            "Since what year does {e} exist, from its founding?",
        ),
    ),
)
