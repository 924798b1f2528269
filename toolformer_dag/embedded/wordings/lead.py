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
    ),
    "wiki_search": (
        "according to the encyclopaedia, ",
        "the encyclopaedia says that ",
        "in the article we read that ",
        "we looked it up. In short, ",
        "the reference books agree that ",
        "from the archive: ",
    ),
}
UNSEEN_STATEMENT_LEADS = {
    "question_answering": ("did you know? Even so, ", "one more thing before we close the page: "),
    "wiki_search": ("whoever opens the encyclopaedia finds out that ", "a look into the old volumes shows that "),
}
QUESTION_LEADS = {
    "question_answering": (
        "",
        "Here is a question for you. ",
        "Quiz night again! ",
        "A reader asks: ",
        "Now a question about our region. ",
    ),
    "wiki_search": (
        "Look it up in the encyclopaedia. ",
        "Homework for the library: ",
        "A question for those who like reference books. ",
        "The article has the facts. ",
    ),
}
UNSEEN_QUESTION_LEADS = {
    "question_answering": ("Who can tell me this, please? ",),
    "wiki_search": ("Take the encyclopaedia from the shelf and tell me. ",),
}
TAILS = (".", ".", ".", ", as many people know.", ", they say.", ", of course.")
