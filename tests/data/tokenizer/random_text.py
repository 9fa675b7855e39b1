# SPDX-License-Identifier: Apache-2.0
"""Random strings that tokenizers disagree about: scripts, spaces, line ends, contractions, numbers."""

SCRIPTS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "\u00e4\u00f6\u00fc\u00df\u00e9\u00f1\u00c5\u017f\u0131\u01c5",
    "\u03b1\u03b2\u03b3\u03a9", "\u0416\u0434\u044f\u0457", "\u05d0\u05d1\u05ea", "\u0627\u0628\u064e\u0640\u06cc", "\u0915\u093f\u094d\u0937",
    "\u0e01\u0e32\u0e33\u0e49", "\u4e2d\u6587\u9fff\u3042\u30a2\u30fc\u3005", "\ud55c\uae00\u1100", "\U00010400\U0001d400\U00020000\U0001e900",
    "\u02b0\u2071\u2c7c\uff41\u2126\u212a", "\u13a0\uab70\u10d0\u1c90\u0561",
]
NUMBERS = ["0123456789", "\u0660\u0966\u0e51\uff17", "\u00b2\u00bc\u2155\u2167\u2460\u3007\u3220\U0001d7d9\U0001f100", "\u4e00\u4e8c"]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\r", "\v\f", "\u00a0", "\u1680", "\u2003\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u0085"]
SYMBOLS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + [
    "\u0301", "\u20dd", "\ufe0f", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e", "\u2019", "\u00b4", "\u20ac", "\u2211", "\0",
    "\x1c", "\x1f", "\x7f", "\x9f", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\ue000", "\ufffd",
    "\uffff", "\U0010ffff"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'vE", "'M", "'lL", "'LL", "'D", "'\u017f", "\u2019s",
                "'r", "'l", "'v", "'x", "''s", " 's", "'s's"]


META = "\u2581"  # SentencePiece's space
# Little but letters and spaces, many of them: what tokens of several words are made of.
SPACED = ["ab", "abc", "a", "b", " ", " ", "  ", "    ", META, "\n", "the", " the", "\u4e2d"]


def random_text(rng, extra=(), common=()):
    """`extra`: strings to strew in, such as special tokens. `common`: strings that are half of the text."""
    def letters():
        script = rng.choice(SCRIPTS[:2] * 4 + SCRIPTS)
        return "".join(rng.choice(script) for _ in range(rng.randint(1, 8)))

    def numbers():
        digits = rng.choice(NUMBERS[:1] * 3 + NUMBERS)
        return "".join(rng.choice(digits) for _ in range(rng.randint(1, 8)))

    def spaces():
        return "".join(rng.choice(SPACES[:6] * 2 + SPACES) for _ in range(rng.randint(1, 4)))

    def symbols():
        return "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(1, 4)))

    parts = [letters] * 4 + [lambda: " "] * 4 + [numbers] * 2 + [spaces] * 2 + [symbols] * 2 + [lambda: rng.choice(CONTRACTIONS)] * 2
    parts += [lambda: rng.choice(extra)] * (2 if extra else 0)
    parts += [lambda: rng.choice(common)] * (len(parts) if common else 0)
    return "".join(rng.choice(parts)() for _ in range(rng.randint(0, 12)))
