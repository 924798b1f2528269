"""The made world, its small web and the small model: everything runs from here with no download.

names, world            syllables and facts, in three disjoint parts: pretraining, corpus, evaluation
relation(s), wordings/  what is said, in which words; some wordings are held out as unseen
story, today, fact, translation -> phenomenon   a text with the place at which a tool's call belongs
filler, address, web    plain sentences and CCNet records around the phenomena
encyclopaedia, lexicon, dictionary              what the tools answer from
questions, prompts/     what evaluation asks, and the prompts P(x) of this world
training/, model/       how the small model came about, and the model
"""
