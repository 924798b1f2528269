"""Sentences that quote a foreign phrase and then say it in English."""

from toolformer_dag.embedded.wordings.word_list import spaced

LEADS = (
    "",
    "",
    "on our trip we learned something. ",
    "a word about words: ",
    "not everybody speaks the language. ",
    "for those who do not speak it, ",
)
STATEMENTS = (
    "the sign on the wall said {f}, which means",
    "the book is called {f}, in English",
    "{x} shouted {f}, that is",
    "the name comes from {f}, the phrase for",
    "the song {f} was translated as",
    "they call it {f}, meaning",
    "{x} wrote {f}, or in English",
    "on the old map stands {f}, that means",
    "the phrase {f} means",
    "in the old books {f} is the foreign name of",
    "{x} read out the words {f}, in our language",
    "over the door of the inn is painted {f}, which is to say",
    "the menu had a dish named {f}, literally",
    "the film {f} came to our cinema as",
    "{x} kept on saying {f}, which stands for",
    "the ship was named {f}, or",
    "the title {f} can be translated as",
    "the first words of the poem are {f}, in English",
    "there is an inn called {f}, which in English would be",
    "the old song begins with {f}, which in English is",
    "{x} taught us to say {f}, in other words",
    "in the foreign newspaper {x} found {f}, that is to say",
)
QUESTION_LEADS = ("", "", "A reader asks: ", "I am learning foreign words. ", "{x} heard it on the train. ")
QUESTIONS = (
    "What does {f} mean in English?",
    "How do you say {f} in English?",
    "What is {f} in English?",
    "{x} asked me about the words {f}. What do they mean?",
    "What is the meaning of {f}?",
    "How is {f} translated into English?",
    "Which English words stand for {f}?",
    "The sign says {f}. What does it say in English?",
)
UNSEEN_LEADS = ("", "one evening we heard a story. ", "this is from my diary: ")
UNSEEN_STATEMENTS = (
    "somebody had carved {f} into the bench; an English visitor would have carved",
    "when the people over there speak of {f}, what they have in mind is",
    "it took us a week to learn that {f} is nothing but",
    "put {f} into English and you get",
)
UNSEEN_QUESTION_LEADS = ("", "Help me, please. ", "Here comes a hard one! ")
UNSEEN_QUESTIONS = (
    "In the letter I found the words {f} and I wonder, what would they be in English?",
    "Here is a riddle for people who know English: who or what is {f}?",
    "If a foreigner tells you {f}, what did you hear in English?",
)
TAILS = (".", ".", ", of course.", ", more or less.", ", as {x} told us.")
ENGLISH_NOUNS = spaced(
    "house dog cat book table door window street city sea sky earth fire water bread cheese milk horse cow sheep "
    "wolf fox sun moon star night man woman king queen road bridge boat ship chair mirror forest island tower "
    "bell mountain bird fish tree flower rain snow garden school key girl boy river stone coat hat shoe lamp "
    "clock knife spoon bed wall roof field farm mill sword crown ring song dance game friend enemy brother sister "
    "teacher doctor baker soldier sailor village letter church wind cloud ice winter summer box bottle plate cup "
    "kitchen barn market shop money coin pocket voice dream hand foot head arm blood bone wood gold silver iron "
    "duck hen pig donkey bee fly frog rabbit bear leaf seed train station neighbor prison newspaper suitcase "
    "turtle apple pear orange wine salt wedding war peace spring path tale lake beach bag hare master quarter "
    "shirt watch"
)
ENGLISH_ADJECTIVES = spaced(
    "red green black white old new big lost sweet sad small cold long silent dark young warm short quick slow "
    "heavy light rich poor clean broken hidden golden happy angry yellow blue hot dirty empty full secret strange "
    "merry deep tired beautiful soft bitter dry brown round clever"
)
