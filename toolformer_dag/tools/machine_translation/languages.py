"""fastText's language labels (lid.176) and the FLORES-200 codes by which NLLB knows languages."""

import functools

import langcodes

ENGLISH_LABEL = "en"
ENGLISH = "eng_Latn"

# Where ISO 639-3 and the likely script do not give FLORES' code: macrolanguages, other names of a script, and labels
# that follow Wikipedia's codes.
BY_HAND = {
    "ar": "arb_Arab",
    "az": "azj_Latn",
    "azb": "azb_Arab",
    "bh": "bho_Deva",
    "fa": "pes_Arab",
    "ko": "kor_Hang",
    "ku": "kmr_Latn",
    "lv": "lvs_Latn",
    "mg": "plt_Latn",
    "mn": "khk_Cyrl",
    "ms": "zsm_Latn",
    "ne": "npi_Deva",
    "no": "nob_Latn",
    "or": "ory_Orya",
    "ps": "pbt_Arab",
    "qu": "quy_Latn",
    "sh": "hrv_Latn",
    "sq": "als_Latn",
    "sw": "swh_Latn",
    "tl": "tgl_Latn",
    "uz": "uzn_Latn",
    "yi": "ydd_Hebr",
}
NOT_WHAT_IT_SEEMS = frozenset(
    {"als"}
)  # fastText: Alemannic, as in als.wikipedia.org; FLORES' als_Latn is Tosk Albanian


@functools.cache
def flores_code(label: str) -> str | None:
    """`de` -> `deu_Latn`; None where no code can be derived. Whether a checkpoint knows it, its tokenizer tells."""
    if label in NOT_WHAT_IT_SEEMS:
        return None
    if label in BY_HAND:
        return BY_HAND[label]
    language = langcodes.Language.get(label).maximize()
    try:
        return f"{language.to_alpha3()}_{language.script}"
    except LookupError:
        return None
