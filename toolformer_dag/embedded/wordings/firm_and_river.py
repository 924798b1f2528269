"""What is said of firms and rivers."""

from toolformer_dag.embedded.relation import Relation

FIRM = (
    Relation(
        kind="firm",
        key="founder",
        keyword="founder",
        question="Who founded {e}?",
        sentences=("The founder of {e} is {v}.", "{e} was founded by {v}."),
        statements=(
            "{e} was founded by {v}",
            "the founder of {e} is {v}",
            "{e} was the idea of {v}",
            "{e} was set up by {v}",
            "the firm {e} was started by {v}",
            "the man or woman who founded {e} was {v}",
            "{e} belongs to its founder {v}",
        ),
        questions=("Who founded {e}?", "Who is the founder of {e}?", "Who started the firm {e}?"),
        unseen_statements=(
            "in the hall of {e} hangs a picture of its founder {v}",
            "without an evening in the garden there would be no {e}, says its founder {v}",
        ),
        unseen_questions=(
            "Which person is the founder of {e}?",
            "What is the name of the person who founded {e}?",
        ),
    ),
    Relation(
        kind="firm",
        key="head_office",
        keyword="head office",
        question="Where is {e} based?",
        sentences=("The head office of {e} is in {v}.", "{e} is based in {v}."),
        statements=(
            "{e} is based in {v}",
            "the head office of {e} is in {v}",
            "{e} does its work from {v}",
            "you can visit {e} in {v}",
            "the firm {e} has its offices in {v}",
            "{e} moved its head office to {v}",
            "the head office of the firm {e} stands in {v}",
        ),
        questions=("Where is {e} based?", "In which town is {e} based?", "Where is the head office of {e}?"),
        unseen_statements=(
            "those who work for {e} take the morning train to {v}",
            "letters to {e} carry the name of the town of {v}",
        ),
        unseen_questions=(
            "Which town is the head office of {e} in?",
            "To what town do letters for the head office of {e} go?",
        ),
    ),
    Relation(
        kind="firm",
        key="wares",
        keyword="wares",
        question="What does {e} make?",
        sentences=("The wares of {e} are {v}.", "{e} makes {v}."),
        statements=(
            "{e} is a maker of {v}",
            "{e} sells mostly {v}",
            "the firm {e} makes {v}",
            "the workers of {e} make {v}",
            "{e} is a big name in {v}",
            "the wares of {e} are {v}",
            "shops everywhere order from {e} their {v}",
        ),
        questions=("What does {e} make?", "What does the firm {e} sell?", "What are the wares of {e}?"),
        unseen_statements=(
            "the ships that leave {e} are loaded with {v}",
            "if you own something from {e}, it must be {v}",
        ),
        unseen_questions=(
            "Which wares does {e} make?",
            "What wares leave the doors of {e}?",
        ),
    ),
    Relation(
        kind="firm",
        key="opened",
        keyword="opening year",
        question="In which year did {e} open?",
        sentences=("The opening year of {e} is {v}.", "{e} opened in the year {v}."),
        statements=(
            "{e} opened in the year {v}",
            "the opening year of {e} is {v}",
            "the firm {e} has been at work since the year {v}",
            "{e} sold its first wares in the year {v}",
            "{e} opened its doors in the year {v}",
            "the firm {e} began its business in the year {v}",
        ),
        questions=("In which year did {e} open?", "What is the opening year of {e}?", "What year did {e} open in?"),
        unseen_statements=(
            "every box from {e} bears the year {v}",
            "customers have walked into {e} ever since {v}",
        ),
        unseen_questions=(
            "The opening of {e} was in which year?",
            "The opening year of {e} is which year?",
        ),
    ),
)

RIVER = (
    Relation(
        kind="river",
        key="length",
        keyword="length",
        question="How long is the river {e}?",
        sentences=("The length of the {e} is {v}.", "The {e} is {v} long."),
        statements=(
            "the length of the river {e} is {v}",
            "the river {e} has a length of {v}",
            "the water of the {e} runs for {v}",
            "a boat on the {e} can travel {v}",
            "the {e} is a river with a length of {v}",
        ),
        questions=(
            "How long is the river {e}?",
            "What is the length of the {e}?",
            "What length does the river {e} have?",
        ),
        unseen_statements=(
            "who walks along the {e} from end to end walks {v}",
            "from the first drop to the last, the {e} measures {v}",
        ),
        unseen_questions=(
            "The river {e} has what length?",
            "From one end of the {e} to the other, what is the length?",
        ),
    ),
    Relation(
        kind="river",
        key="sea",
        keyword="sea",
        question="Into which sea does the {e} flow?",
        sentences=("The {e} flows to {v}.", "The sea at the end of the {e} is {v}."),
        statements=(
            "the river {e} flows into {v}",
            "the {e} ends in {v}",
            "the boats on the {e} go down to {v}",
            "the {e} carries its water to {v}",
            "at its end the river {e} meets {v}",
        ),
        questions=(
            "Into which sea does the {e} flow?",
            "In which sea does the river {e} end?",
            "What sea does the {e} reach?",
        ),
        unseen_statements=(
            "a bottle thrown into the {e} will one day swim in {v}",
            "all the water of the {e} will be salty one day, in {v}",
        ),
        unseen_questions=(
            "The river {e} ends in which sea?",
            "What sea takes in the water of the {e}?",
        ),
    ),
    Relation(
        kind="river",
        key="source",
        keyword="source",
        question="Near which town is the source of the {e}?",
        sentences=("The source of the {e} is near {v}.", "The {e} rises near the town of {v}."),
        statements=(
            "the source of the {e} is near {v}",
            "the river {e} rises near {v}",
            "the {e} begins in the hills above {v}",
            "the first bridge over the {e} stands in {v}",
            "the source of the river {e} lies close to {v}",
        ),
        questions=(
            "Near which town is the source of the {e}?",
            "Near what town does the river {e} rise?",
            "Where is the source of the {e}?",
        ),
        unseen_statements=(
            "follow the {e} up to its source and you come to {v}",
            "children who want to see the {e} as a small spring walk up to {v}",
        ),
        unseen_questions=(
            "The source of the {e} is near which town?",
            "What town is next to the source of the {e}?",
        ),
    ),
)
