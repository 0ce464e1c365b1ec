r"""Read the final number of a text as an exact fraction, or None if the answer is not a number.

The number may have words, a unit, or a currency or percent sign around it, and `x =` or `2 + 3 =`
before it, but no other mathematics: no part of 2\pi, x^2 + 1 or (1, 2) counts as the answer.
"""

import calendar
import fractions
import itertools
import re
import unicodedata
from collections.abc import Iterator

# A decimal number, with or without thousands separators, such as `7`, `1,450.25` or `.5`.
DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
TOKEN = re.compile(
    rf"""
    (?P<number>
        # An exponent of ten has at most three digits: 10^999999999 would fill the memory.
        (?P<sign>(?<![\w)\]}}%])[-+])?
        (?:
            (?P<whole>\d+)[^\S\n]+(?P<part>\d+)\s?/\s?(?P<parts>\d+)
            | (?P<bare>10)\^(?P<power>[-+]?\d{{1,3}})(?!\d)
            | (?P<decimal>{DECIMAL})
              (?:
                (?:[eE]|\s?\*\s?10\^)(?P<exponent>[-+]?\d{{1,3}})(?!\d)
                | \s?/\s?(?P<denominator>{DECIMAL})
              )?
        )
    )
    | (?P<command>\\[A-Za-z]+|\\.)
    # A hyphen joins words, but x-y is a difference of two variables, except in "the x-y plane".
    | (?P<word>
        (?![^\W\d_]-[^\W\d_](?![^\W\d_]|\s[a-z]{2}))[^\W\d_]+(?:['\u2019/-][^\W\d_]+)*
        | [^\W\d_]
    )
    | (?P<line>\n)
    | (?P<symbol>[^\s])
    """,
    re.X,
)
# Symbols that belong to a sentence. Any other symbol but an emoji belongs to mathematics.
PUNCTUATION = set(".,;:?!\"'()[]%\u00b0\u2019\u201c\u201d-\u2013\u2014")
OPENING = set("([")
EQUALS = set("=\u2248")
# If one of these words joins two numbers, as in `2 and 3` or `2 plus 3`, neither is the answer.
JOINING = set("and or to by over through x vs in per plus minus times remainder".split())
MATHS = set(
    "sqrt pi log ln sin cos tan exp mod modulo factorial inf infinity choose squared cubed".split()
)
# Before a number, these words are operations, as in "half of 5".
OPERATIONS = set("root half third quarter twice double triple reciprocal".split())
# After a number, a short string of letters is a product of variables, as in 2 xy, unless it is one
# of these units or words. Only UNITS and TIMES may follow without a space, as in 5cm. A single
# letter without a space, as in 5m, counts as a variable.
UNITS = set(
    "cm mm km kg mg lb lbs oz ft in mi mph kph min mins hr hrs sec secs ml mL dB Hz kHz MHz GHz kW "
    "MW kWh Wh am pm AM PM th st nd rd deg ms ns sq yd yds pt qt gal cal kcal MB GB TB KB mol atm "
    "pts pcs usd USD EUR GBP RMB Rs yr yrs kgs kJ nm tsp tbsp dm wk wks ppl kmph rpm".split()
)
SHORT_WORDS = set(
    "of is at on as an if we he it so am be my are was has had her his to do go up no".split()
)
LETTERS_AS_UNITS = set("mgshlL")
LETTERS_AS_WORDS = set("aAI")
# Words that multiply a number by a power of ten, with the power's exponent.
TIMES = dict(hundred=2, thousand=3, lakh=5, million=6, crore=7, billion=9, trillion=12)
# Words that divide a number, as in 2 thirds.
PARTS = set("halves thirds fourths fifths sixths eighths tenths hundredths".split())
# A ratio or a power, as in "3 to one" and "2 to the tenth".
TO_A_NUMBER = re.compile(
    r"\s+to\s+(?:the\b|[^\W\d_]\b|(?:one|two|three|four|five|six|seven|eight|nine|ten)\b)"
)

# A measure that a second number continues, as in "5 hours 30 minutes".
MEASURE = re.compile(
    r"\d\s*(?:hours?|hrs?|minutes?|mins?|days?|weeks?|years?|feet|foot|ft|yards?|pounds?|lbs?|"
    r"dollars?|kg|小时|分钟)(?:\s+and)?\s+\Z"
)
# After a number, these words add a fraction to it, as in 2 hours and a half.
AND_A_HALF = re.compile(r"(?:\s+[^\W\d_]+)?\s+and an? (?:half|third|quarter)\b")
# A new formula begins after one of these. A plain arrow may also belong to a limit, as in x → 0, so
# `name =` must follow it.
ARROWS = re.compile(
    r"[⇒⟹∴]|\\(?:Rightarrow|implies|therefore)(?![A-Za-z])"
    r"|(?:→|\\rightarrow(?![A-Za-z]))(?=\s*\w+\s?=)"
)
# The left side of an equation may be one of these names: x, x_1, \theta, f(3), \angle A. There is a
# space between two tokens.
NAME = re.compile(
    r"(?:\\angle )?(?:[^\W\d_]|\\[a-z]+)(?: _ (?:\{ )?\w+(?: \})?)?(?: \( (?:- )?\w+ \))?"
)

# A line such as "#### 2. Add both" or "#### (2) Total" is a heading of Markdown if text follows it.
HEADING = r"\(?\d+(?:[.):]|\s[-\u2013])[^\S\n]+[^\d\s].*\n\s*\S"
# LaTeX's \boxed{}, whose content may have braces nested up to three deep.
BOXED = re.compile(r"\\boxed\s?\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)")
# A reference is more than an answer if it has several lines or sentences, or if it begins with a
# word or with the letter of a choice. The name of a LaTeX command is not a word.
SENTENCE = re.compile(r"\n|[.!?]\**\s+\w{2}")
FIRST_WORD = re.compile(r"[^\w\\]*(?:[^\W\d_]{2}|[aAI]\s[a-z]{2}|[A-E][.):]\s)")
# These begin with a word, too, but are not sentences: equations, such as `AB = 9, CD = 4`; named
# numbers, such as `base 5, height 10`; and a date.
EQUATIONS = re.compile(r"\W*(?:\w+\s){0,2}\w+\s?=[^=]+?(?:,(?!\d{3})|;|\b(?:and|or)\b)\W*\w+\s?=")
# A number after one or two words that name it, and its unit. Words such as `so` do not name a
# number: `He has 4, so 5` is a sentence.
NAMED = (
    rf"(?!(?:so|thus|hence|then)\b)[^\W\d_]+(?:\s[^\W\d_]+)?\s*(?::\s*)?-?{DECIMAL}"
    r"(?:\s?[^\W\d_]+|%)?"
)
JOINT = r"(?:\s*[,;]\s*(?:and\s|or\s)?|\s(?:and|or)\s)"
NAMED_NUMBERS = re.compile(rf"\W*{NAMED}(?:{JOINT}{NAMED})+\W*")
MONTH = "|".join([*calendar.month_name[1:], *calendar.month_abbr[1:]])
DAY = r"\d{1,2}(?:st|nd|rd|th)?"
DATE = re.compile(
    rf"\W*(?:(?:{MONTH})\.?\s{DAY}|{DAY}\s(?:of\s)?(?:{MONTH})\.?)(?:,?\s\d{{4}})?\W*", re.I
)
# A reference whose answer is longer than this, such as the tests of a program, is not read.
MAX_CHARACTERS = 20_000
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# {Chinese or Japanese punctuation mark: the English mark and a space}. Letters of these languages
# and of Korean are words, and may directly precede or follow a number.
EAST_ASIAN = {
    ord(mark): f"{ours} " for mark, ours in zip("。，、：；！？（）", ".,,:;!?()", strict=True)
}
BESIDE = "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]"
# After a number, these characters multiply it, or add a half.
EAST_ASIAN_SCALES = "百千万萬亿億半"


def without_thoughts(text: str) -> str:
    """The text after the last </think>, or the text before it if nothing follows."""
    before, _, after = text.rpartition("</think>")
    return after if after.strip() else before


def final_number(text: str, is_reference: bool = False) -> fractions.Fraction | None:
    r"""Returns the final answer in a text, or None if the answer is not a number.

    The answer may be marked by <answer>, even nested or not closed; by \boxed{}; or by #### before
    it on its line. If a text has several kinds of marks, only <answer> counts, or else \boxed{}.
    The last mark that counts and is not empty has the answer; if all are empty, there is no answer.
    Without marks, the answer is the last number of the text, unless it is part of a formula.
    Thoughts, up to </think>, do not count if anything follows.

    is_reference: the text is the answer of a row. Without marks and without a sentence, it is read
    as if it were marked: `2 cm and 3 cm` is not a number.
    """
    text = without_thoughts(text)
    marked = marked_parts(text)
    if marked:
        text = next((part for part in reversed(marked) if part.strip()), "")
        # A marked answer may itself contain a \boxed{}.
        text = next(reversed(BOXED.findall(text)), text)
    if is_reference and len(text) > MAX_CHARACTERS:
        return None
    is_marked = bool(marked) or (is_reference and not has_sentence(text))
    return read_number(text, is_marked)


def is_worked_out(reference: str) -> bool:
    """Whether a reference is read by its last number, because it has a sentence and no marks."""
    text = without_thoughts(reference)
    return not marked_parts(text) and has_sentence(text)


def has_sentence(reference: str) -> bool:
    """Whether a reference without marks is more than an answer."""
    text = plain(reference).strip()
    if NAMED_NUMBERS.fullmatch(text) or DATE.fullmatch(text):
        return False
    begins_sentence = FIRST_WORD.match(text) and not EQUATIONS.match(text)
    return bool(begins_sentence or SENTENCE.search(text))


def marked_parts(text: str) -> list[str]:
    """The contents of the marks of a text that count (see `final_number`)."""
    # Write \fbox{5} and \boxed 5 as \boxed{5}.
    if "\\boxed" not in text:
        text = re.sub(r"\\fbox\s?\{", r"\\boxed{", text)
    text = re.sub(r"\\boxed\s(-?[\d.,/]*\d)", r"\\boxed{\1}", text)
    # Move the sign of -\boxed{5} into the box, unless the box is subtracted from something. In
    # "- \boxed{5}", the sign may be a bullet or a dash, except after a sign such as =.
    text = re.sub(r"(?<![\w)\]}])(?<![\w)\]}]\s)-\\boxed\s?\{", r"\\boxed{-", text)
    text = re.sub(r"([=≈$(\[{]|\bis(?= -\\))[^\S\n]?-\s?\\boxed\s?\{", r"\1 \\boxed{-", text)
    return (
        re.findall(r"<answer>(.*?)(?=<answer>|</answer|\Z)", text, re.S | re.I)
        or BOXED.findall(text)
        or re.findall(
            rf"####[^\S\n]*\*{{0,2}}(?!{HEADING})(?=[-+\u2212\u2013$€£¥₹\\(.\d])(.*)", text
        )
    )


def usual(text: str) -> str:
    """Replace unusual characters with the ones that English text uses."""
    # Drop replacement characters, which tokenizers write for incomplete characters, and characters
    # that are invisible: joiners, and emoji modifiers.
    text = text.replace("\ufffd", " ")
    text = re.sub("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff\U0001f3fb-\U0001f3ff]", "", text)
    # U+2212 is a minus and never a dash, even with a space after it.
    text = re.sub(r"\u2212[^\S\n]*", "-", text)
    # ½ is 1/2, and 3½ is 3 1/2.
    fraction = "[\u00bc-\u00be\u2150-\u215e]"
    text = re.sub(rf"(?<=\d)(?={fraction})", " ", text)
    text = re.sub(fraction, lambda m: unicodedata.normalize("NFKC", m[0]), text)
    # Narrow and no-break spaces group digits, as in 10 000.
    grouped = r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2009\u202f]\d{3})+(?!\d)"
    text = re.sub(grouped, lambda m: re.sub(r"\s", "", m[0]), text)
    text = text.translate({ord("º"): "\u00b0", ord("˚"): "\u00b0", ord("％"): "%"})
    text = text.replace("\u2044", "/").translate(EAST_ASIAN)
    return re.sub(rf"(?<={BESIDE})(?=(?:\*\*)?[-\d])|(?<=\d)(?={BESIDE})", " ", text)


def plain(text: str) -> str:
    """Rewrite LaTeX as plain text: 3\\frac12 becomes 3 1/2."""
    # A "-" that begins a formula is a minus.
    text = re.sub(r"([$(][^\S\n]?)-[^\S\n]+(?=[\d.\\])", r"\1-", usual(text)).replace("{,}", ",")
    # Drop Markdown's marks of code and of italics, and the calculations in GSM8K's << >>.
    text = re.sub(r"<<[^<>]*>>|`", " ", text)
    text = re.sub(r"(?<![\w*)])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*(])", r"\1", text)
    # A dash right before a number is a minus, unless it is between two numbers or words.
    text = re.sub(r"(?<![\w)\]}%])[\u2013\u2014](?=[$\u20ac\u00a3]?\.?\d)", "-", text)
    # Replace LaTeX's spaces and the commands that only affect typesetting.
    text = re.sub(r",\\!\s*(?=\d{3})", ",", text)
    text = re.sub(r"\\!", "", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3})", "", text)
    text = re.sub(r"\\(?:[,;: ()\[\]]|(?:q?quad|left|right|displaystyle)(?![A-Za-z]))|~", " ", text)
    typefaces = r"\\(?:text|math)?(?:text|bf|rm|it|sf|mbox|bm|boldsymbol)"
    text = re.sub(typefaces + r"\s?\{([^{}]*)\}", r" \1", text)
    # Drop braces around all of the text.
    text = re.sub(r"\A\s*\{([^{}]*)\}\s*\Z", r"\1", text)
    text = re.sub(r"\\([%$])", r"\1", text)
    text = re.sub(r"\^?\{?(?:\\circ|\\degree)(?![A-Za-z])\s?\}?", "\u00b0", text)
    text = re.sub(r"\u00b0\s*[CF]\b", "\u00b0", text)
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])|[\u00d7\u00b7]", "*", text)
    text = re.sub(r"\\(?:approx|simeq)(?![A-Za-z])", "\u2248", text)
    # Fractions of numbers, as in \frac{1}{2}, \frac1{2} and \frac12.
    argument = rf"\s?(?:\{{\s?(-?{DECIMAL})\s?\}}|(\d))"
    text = re.sub(rf"(\d\s?)?\\[cdt]?frac{argument}{argument}", fraction_text, text)
    # Powers: 10^{-3}, 10**3, 10⁻³. Other pairs of stars are Markdown's bold type, which may follow
    # a Chinese letter without a space.
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^" + m[0].translate(SUPERSCRIPTS), text)
    text = re.sub(r"(?<=[A-Za-z0-9])\*\*(?=[-A-Za-z0-9])", "^", text).replace("**", "")
    text = re.sub(r"\^\{\s?([-+]?\d+)\s?\}", r"^\1", text)
    # An x between two numbers is a sign of multiplication.
    text = re.sub(r"(?<=[\d)%])\s?x\s?(?=[$€£(]?\.?\d)", "*", text)
    # Drop the exponent of a unit, as in 25 cm^2 or 25 m^2: it is not a number of its own.
    text = re.sub(r"((?<=\d)[\s$]*[A-Za-z]{2,}|\s[mL]|/[mshL])\^-?\d\b", r"\1", text)
    # km / h is one unit.
    text = re.sub(r"(?<=\d)(\s*)(km|mi|ft|m|cm)\s*/\s*(hr|h|sec|s|min)\b", r"\1\2/\3", text)
    # A price per unit, as in $15/hour, is a number with a unit.
    text = re.sub(
        r"(?<=\d)\s?/\s?(?=(?:lb|kg|km|hr)\b|(?=[A-Za-z]{3})[A-Za-z]*[aeiou])", " per ", text
    )
    # The letter of a choice, as in (B) 18, is not a factor.
    text = re.sub(r"(?<![\w)\]])\([A-E]\)\s*(?=[-.\d$\\])", " ", text)
    # Write a minus before a number as "-", even if it is a word. Then drop currency signs, and the
    # dollar signs around a formula.
    text = re.sub(r"\b(?:minus|negative)\s(?=[$€£\d.])", "-", text)
    text = re.sub(r"-\s?[$€£]\s?(?=[\d.])", "-", text)
    return re.sub("[$€£¢¥₹]", " ", text)


def fraction_text(match: re.Match) -> str:
    """The text a/b of a LaTeX fraction, separated from a whole number before it."""
    before, numerator, digit, denominator, last_digit = match.groups()
    text = f"{numerator or digit}/{denominator or last_digit}"
    return f"{before} {text}" if before else text


def read_number(text: str, is_marked: bool) -> fractions.Fraction | None:
    """Returns the number that a marked answer states, such as 5 for `2 + 3 = 5`, or the last number
    of an unmarked text. Returns None if there is no number, or if it is part of a formula."""
    # Most answers are a short integer and nothing else, which is quick to read.
    if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        # Also strip control characters such as \x1f, which `\s` matches and `int` refuses.
        return fractions.Fraction(int(text.strip()))
    text = plain(text)
    if not is_marked:
        text = ARROWS.sub("\n", text)
    tokens = list(TOKEN.finditer(text))
    places = [i for i, token in enumerate(tokens) if token["number"]]
    if not places or (is_marked and DATE.fullmatch(text)):
        return None
    last = places[-1]
    number = tokens[last]
    before = tokens[:last]
    sign = 1
    # A plus or minus with a space after it is the number's sign if no term comes before it.
    if before and before[-1][0] in "-+" and (len(before) == 1 or before[-2][0] in EQUALS):
        sign = -1 if before[-1][0] == "-" else 1
        before = before[:-1]
    value = value_of(number)
    # Digits attached to the text before them, as in x2 or _8, are not a number.
    if value is None or re.search(r"[\w.)\]}]\Z", number.string[: number.start()]):
        return None
    scale = scale_after(number, tokens[last + 1 :], is_marked)
    if scale is None or not may_precede(before, number, is_marked):
        return None
    return sign * value * scale


def value_of(token: re.Match) -> fractions.Fraction | None:
    """The value of a number token; None for x/0, 2 3/2, and more digits than Python converts."""
    sign = -1 if token["sign"] == "-" else 1
    try:
        if token["whole"]:
            part = fractions.Fraction(int(token["part"]), int(token["parts"]))
            # 2 3/2 is not a mixed number.
            return sign * (int(token["whole"]) + part) if part < 1 else None
        if token["bare"]:
            return sign * fractions.Fraction(10) ** int(token["power"])
        value = fractions.Fraction(token["decimal"].replace(",", ""))
        value *= fractions.Fraction(10) ** int(token["exponent"] or 0)
        value /= fractions.Fraction((token["denominator"] or "1").replace(",", ""))
        return sign * value
    except (ZeroDivisionError, ValueError):
        return None


def is_letter(token: re.Match) -> bool:
    """Whether a token is a single letter, which may be a variable."""
    return bool(token["word"]) and len(token[0]) == 1 and not is_east_asian(token[0])


def is_east_asian(word: str) -> bool:
    return bool(re.match(BESIDE, word))


def is_maths(token: re.Match) -> bool:
    """Whether a token belongs to a formula: an operator, a LaTeX command, a name such as sqrt."""
    is_emoji = token["symbol"] and unicodedata.category(token[0]) == "So"
    is_operator = token["symbol"] and token[0] not in PUNCTUATION and not is_emoji
    return bool(is_operator or token["command"] or token[0].lower() in MATHS)


def scale_after(
    number: re.Match, after: list[re.Match], is_marked: bool
) -> fractions.Fraction | int | None:
    """Returns the factor by which the words after a number multiply it, such as 10**6 for million;
    None if a formula continues after the number."""
    for place, token in enumerate(after):
        if token["line"] or is_end_of_sentence(token):
            break
        if is_maths(token):
            return None
        is_known = token[0] in LETTERS_AS_UNITS | LETTERS_AS_WORDS
        if is_marked and is_letter(token) and not is_known:
            return None
        # A letter after a minus sign is a variable that is subtracted.
        if is_letter(token) and place > 0 and after[place - 1][0] == "-":
            return None
    while after and after[0][0] in "%\u00b0":
        after = after[1:]
    if not after or after[0]["line"]:
        return 1
    # 0.333... is not 0.333.
    goes_on = "." in number[0] and number.string.startswith("..", number.end())
    if goes_on or AND_A_HALF.match(number.string, number.end()):
        return None
    if TO_A_NUMBER.match(number.string, number.end()):
        return None
    first = after[0]
    is_attached = first.start() == number.end()
    if first["word"]:
        scale = word_scale(first[0], is_attached)
        # Several such words multiply, as in 5 hundred thousand.
        while scale and scale > 1 and len(after) > 1 and after[1][0].lower() in TIMES:
            after = after[1:]
            scale *= 10 ** TIMES[after[0][0].lower()]
        return scale
    # A symbol attached to the number may continue a formula, as in 5!, 5(x), 5[x] and 5:x.
    return None if is_attached and first[0] in "!([:" else 1


def word_scale(word: str, is_attached: bool) -> int | None:
    """Returns the factor by which the word after a number multiplies it; None for a variable, as in
    2x or 2 xy."""
    times = TIMES.get(word.lower().removesuffix("s"))
    if times:
        return 10**times
    if word.lower() in PARTS:
        return None
    if is_east_asian(word):
        return None if word[0] in EAST_ASIAN_SCALES else 1
    parts = re.split("[/-]", word)
    if is_attached and parts[0] not in UNITS:
        return None
    # Plurals such as CDs, and compounds such as T-shirts, count as one word.
    if re.fullmatch("[A-Z]{2,}s|[A-Za-z]-[a-z]{3,}", word):
        return 1
    for part in parts:
        is_known = part in UNITS | SHORT_WORDS | LETTERS_AS_UNITS | LETTERS_AS_WORDS
        # Any other string is a word only if it has at least three letters, one of them a vowel or
        # a letter beyond a to z.
        is_word = len(part) >= 3 and re.search("[aeiouyAEIOUY]|[^a-zA-Z]", part)
        if not is_known and not is_word:
            return None
    return 1


def is_end_of_sentence(token: re.Match) -> bool:
    return token[0] in ".?!;" and token.string[token.end() : token.end() + 1] in ("", " ", "\n")


def is_semicolon_in_list(token: re.Match) -> bool:
    """Whether a semicolon follows a number, as in 2; 3."""
    return token[0] == ";" and bool(re.search(r"\d\s?\Z", token.string[: token.start()]))


def may_precede(before: list[re.Match], number: re.Match, is_marked: bool) -> bool:
    """Whether the tokens before a number allow it to stand alone, not as part of a formula."""
    # (1,200) may be a pair.
    if before and before[-1][0] in OPENING and "," in number[0]:
        return False
    if before and before[-1][0] in EQUALS:
        left = list(formula_at_end(before[:-1]))
        # `left` is reversed, so its last token begins the formula. Punctuation there belongs to the
        # sentence, as in "Therefore, x = 5".
        while left and left[-1][0] in ",:(":
            left.pop()
        return is_left_side(left) and not follows_equation(before, left, is_marked)
    # A dash before a number is punctuation only in a sentence, with a space after it.
    if before and before[-1][0] == "-" and (is_marked or before[-1].end() == number.start()):
        return False
    # The sign of -(5) is outside the brackets.
    if len(before) > 1 and before[-1][0] in OPENING and before[-2][0] == "-":
        return False
    if MEASURE.search(number.string[: number.start()]):
        return False
    if is_marked:
        has_formula = any(
            token["number"] or is_maths(token) or token[0].lower() in OPERATIONS for token in before
        )
        has_variable = any(is_variable(token) for token in before)
        return not (has_formula or has_variable or (before and is_call(before[-1])))
    for place in reversed(range(len(before))):
        token = before[place]
        earlier = before[place - 1] if place else None
        if token["line"] or (is_end_of_sentence(token) and not is_semicolon_in_list(token)):
            return True
        if token["number"] or is_maths(token) or is_call(token):
            return False
        if token["word"]:
            is_pair = token[0] in JOINING and earlier and earlier["number"]
            is_next = place == len(before) - 1
            return not (is_pair or is_variable(token) or (is_next and is_operand(before)))
    return True


def is_operand(before: list[re.Match]) -> bool:
    """Whether the last words before a number operate on it, as in `half of 5`, `3 out of 5`."""
    words = [token[0].lower() for token in before[-2:]]
    if words == ["out", "of"]:
        return len(before) > 2 and bool(before[-3]["number"])
    return words[-1] in OPERATIONS or (words[-1] == "of" and words[0] in OPERATIONS)


def follows_equation(before: list[re.Match], left: list[re.Match], is_marked: bool) -> bool:
    """Whether an equation is one of several with different values, as in `x = 2 or x = 3` and
    `width = 5, length = 10`. before: the tokens before its value. left: its left side."""
    # 2 + 3 = 5 is a calculation.
    if left and not any(token["word"] or token["command"] for token in left):
        return False
    earlier = before[: -1 - len(left)]
    if not left and is_marked:
        # The left side is a word.
        return any(token[0] in EQUALS for token in earlier)
    if len(earlier) < 2:
        return False
    joint, value = earlier[-1], earlier[-2]
    return bool(joint[0].lower() in JOINING | {",", ";"} and value["number"])


def is_variable(token: re.Match) -> bool:
    """Whether a token before a number is a letter, and not a word such as `a` or `I`."""
    return is_letter(token) and token[0] not in LETTERS_AS_WORDS


def is_call(token: re.Match) -> bool:
    """Whether a token opens brackets around an argument or a factor, as in f(5) and (3)(5)."""
    place = token.start()
    before = token.string[place - 1 : place] if place else ""
    return token[0] in OPENING and bool(re.match(r"[\w)\]]", before))


def formula_at_end(tokens: list[re.Match]) -> Iterator[re.Match]:
    """Yields the tokens of the formula at the end of a text, from the last one backwards."""
    for token in reversed(tokens):
        is_word = token["word"] and not is_letter(token)
        if token["line"] or is_end_of_sentence(token) or is_word:
            return
        yield token


def is_left_side(tokens: list[re.Match]) -> bool:
    """Whether an equation with this left side states a number, as x = 5 and 2 + 3 = 5 do. tokens:
    in reverse order."""
    letters = [token for token in tokens if token["word"]]
    is_name = NAME.fullmatch(" ".join(token[0] for token in reversed(tokens)))
    if is_name and tokens[-1][0].lstrip("\\").lower() not in MATHS:
        return True
    signs = set("+-\u2013\u2014*/()%=\u2248.:,\u00f7^{}") | {"\\sqrt"}
    # In p + q = 25 + 9 = 34 and x = 60/3 = 20, the last left side is a calculation.
    last = list(itertools.takewhile(lambda token: token[0] not in EQUALS, tokens))
    is_calculation = len(last) > 1 or (last and last[0]["denominator"])
    has_other_signs = any(token[0] in set(",:;<>") for token in tokens)
    sides = last if letters and is_calculation and not has_other_signs else tokens
    return all(token["number"] or token[0] in signs for token in sides)
