"""Sentences that quote a foreign phrase and then say it in English."""

from toolformer_dag.embedded.wordings.word_list import spaced

STATEMENTS = (
    "The sign on the wall said {f}, which means",
    "The book is called {f}, in English",
    "{x} shouted {f}, that is",
    "The name comes from {f}, the phrase for",
    "The song {f} was translated as",
    "They call it {f}, meaning",
    "{x} wrote {f}, or in English",
    "On the old map stands {f}, that means",
    "The phrase {f} means",
    "{f} is the foreign name of",
    "{x} read out the words {f}, in our language",
    "Over the door of the inn is painted {f}, which is to say",
)
QUESTIONS = (
    "What does {f} mean in English?",
    "How do you say {f} in English?",
    "What is {f} in English?",
    "{x} asked me about the words {f}. What do they mean?",
)
UNSEEN_STATEMENTS = (
    "Somebody had carved {f} into the bench; an Englishman would have carved",
    "When the people over there speak of {f}, they have in mind",
)
UNSEEN_QUESTIONS = ("In the letter I found the words {f} and I wonder, what would they be in English?",)
TAILS = (".", ".", ", of course.", ", more or less.")
ENGLISH_NOUNS = spaced(
    "house dog cat book table door window street city sea sky earth fire water bread cheese milk horse "
    "cow sheep wolf fox sun moon star night man woman king queen road bridge boat ship chair mirror "
    "forest island tower bell mountain bird fish tree flower rain snow garden school key girl boy river "
    "stone coat hat shoe lamp clock knife spoon bed wall roof field farm mill sword crown ring song dance "
    "game friend enemy brother sister teacher doctor baker soldier sailor village letter church wind "
    "cloud ice winter summer box bottle plate cup kitchen barn market shop money coin pocket voice dream "
    "hand foot head arm blood bone wood gold silver iron duck hen pig donkey bee fly frog rabbit bear "
    "leaf seed train station neighbor prison newspaper suitcase turtle apple pear orange wine salt "
    "wedding war peace spring path"
)
ENGLISH_ADJECTIVES = spaced(
    "red green black white old new big lost sweet sad small cold long silent dark young warm short quick "
    "slow heavy light rich poor clean broken hidden golden happy angry yellow blue hot dirty empty full "
    "secret strange merry deep tired beautiful soft bitter dry brown round"
)
