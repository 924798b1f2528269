"""What stands before a fact or a question: QA pages talk, search pages cite the encyclopaedia."""

STATEMENT_LEADS = {
    "question_answering": (
        "",
        "as everybody here knows, ",
        "my neighbor told me that ",
        "as far as we know, ",
        "it is said that ",
        "we talked about this at dinner. ",
        "our guide said that ",
        "not everybody knows that ",
        "I was surprised to hear that ",
        "this comes up again and again! ",
        "people often forget that ",
        "to begin with, ",
    ),
    "wiki_search": (
        "according to the encyclopaedia, ",
        "the encyclopaedia says that ",
        "in the article we read that ",
        "we looked it up in the encyclopaedia. ",
        "the reference books agree that ",
        "from the archive: ",
        "the entry states that ",
        "a page of the encyclopaedia tells us that ",
        "under this entry one finds that ",
        "as the article has it, ",
    ),
}
UNSEEN_STATEMENT_LEADS = {
    "question_answering": (
        "one more thing before we close the page: ",
        "ask around in the market and you will hear that ",
        "",
    ),
    "wiki_search": (
        "whoever opens the encyclopaedia finds out that ",
        "a look into the old volumes of the encyclopaedia shows that ",
        "the editors of the encyclopaedia write: ",
    ),
}
QUESTION_LEADS = {
    "question_answering": (
        "",
        "Here is a question for you. ",
        "Quiz night again! ",
        "A reader asks: ",
        "Now a question about our region. ",
        "Question of the week: ",
        "My daughter wants to know: ",
        "Do you know this? ",
    ),
    "wiki_search": (
        "Look it up in the encyclopaedia. ",
        "Homework for the library: ",
        "A question for those who like reference books. ",
        "The article has the facts. ",
        "Open the encyclopaedia! ",
        "Search the archive and tell us: ",
        "The encyclopaedia knows this: ",
    ),
}
UNSEEN_QUESTION_LEADS = {
    "question_answering": (
        "Who can tell me this, please? ",
        "We had an argument last night. ",
        "Before you turn the page: ",
    ),
    "wiki_search": (
        "Take the encyclopaedia from the shelf and tell me. ",
        "It must be somewhere in the encyclopaedia. ",
        "For this one you need the volumes of the encyclopaedia: ",
    ),
}
TAILS = (
    ".",
    ".",
    ".",
    ", as many people know.",
    ", they say.",
    ", of course.",
    ", and that is all we know.",
    ", if I remember well.",
)
