"""The final number of an answer (infra/data/answers.py): which answers are equal, and which have no
number."""

import fractions
import itertools

import pytest
from conftest import read_jsonl, shared

import train
from infra.data import answers
from infra.data.questions import kind_of_reference

# fmt: off
FINAL_NUMBERS = {  # {number: texts whose final number this is}
    # plain: the last one counts; signs, currency, separators, fractions and percent are read
    7: ["007"],
    12345: [r"12\,345"],
    12345678: ["12,345,678 people"],
    -5: ["-5", "x = -5.", "-$5", "$-5", "\u22125", "-\u20ac5", "-\u00a35"],
    1450: ["$1,450", "It costs $1,450.", r"\boxed{1{,}450}", r"\$1,450", "1450.0"],
    "1/2": ["1/2", r"\boxed{\frac{1}{2}}", ".5", "1,000/2,000"],
    "3/4": [r"\frac{1.5}{2}", r"\cfrac{3}{4}", "\u00be"],
    "7/2": ["3.50", "$3.50", "3\u00bd"],
    "3/5": ["1.5/2.5"],
    # marked: <answer> before \boxed{} before ####, closed or not, nested or not
    5: [
        "10 - 5 = 5", "<answer>5", "Answer\n5", "we have 3 apples\n5", "we add (3)\n5", "so\n(5)",
        "<answer>apples\n5</answer>",
        "<answer>3 <answer>5</answer> 9</answer>", "<answer><answer>5</answer></answer>",
        "<answer>4</answer> <answer>5</answer>", "<answer>5</answer> <answer></answer>",
        "first 9 <answer> 5 apples </answer> then 8",
        r"<answer>\boxed{5}</answer>", r"\boxed{1} \boxed{5}", r"\boxed{5",
        r"\boxed{\text{5 apples}}", "#### $5.00", "#### 1\n#### 5\nyes 7",
    ],
    -18: ["The answer is \u2212 18.", r"\(- 18\)", "$- 18$"],
    "-1/2": [r"So the answer is $- \frac{1}{2}$."],
    12: ["2x = 24 \u2192 x = 12", r"$2x = 24 \implies x = 12$", "\u2234 x = 12"],
    15: ["<answer>$15/hour</answer>", "$15/person", "15/week"],
    18: [
        "#### **18**", "#### 18.\n", "#### \u00a518", r"\boxed{\textbf{(D)}\ 18}",
        "18 \u2714\ufe0f", "18 \U0001f44d\U0001f3fd", "18\u200b", "The answer is (B) 18.",
        "\u7b54\u6848\u662f18\u3002", "\u7b54\u6848\uff1a18", "<answer>18\u4e2a</answer>",
        "\u7b54\u3048\u306f18\u3067\u3059\u3002",
        "The answer is 18.", "After the first half, 18 players remained.",
    ],
    20: ["In 3 years, 20 remain", "the 5 boxes hold 4 each, so (4)(5) = 20"],
    25: ["<answer>25 m^2</answer>", r"\boxed{25\text{ cm}^2}"],
    42: ["<answer>42</answer>", r"\boxed{42}", "so\n#### 42", "it is 7, no, 42",
         "<answer>42\x1f</answer>"],
    50: ["50%", r"\boxed{50\%}"],
    # none: no number at all, or not at the mark; more digits than Python converts; a formula
    None: ["The limit is 4 (as x \u2192 2).", "In 2024\u00a0365 days passed",
           "5/0", "no number", "", "<answer>none</answer> 5", "<answer></answer>", "9" * 5000,
           "(3)-2", "10%-20%", "1,2,3", r"\boxed{x^{2} + {3}} 9", "10-5"],
}

# Pairs (reference, answer) that are equal, as found in GSM8K, in MATH and in users' reports.
EQUAL = [
    # references of GSM8K, and the same number as models write it
    ("#### 72", "72"),
    ("#### 72", "The answer is 72."),
    ("#### 72", "<answer>72</answer>"),
    ("#### 72", r"\boxed{72}"),
    ("#### 72", "#### 72"),
    ("#### 72", "**72**"),
    ("#### 72", "The answer is **72**."),
    ("#### 72", "She sold 48 + 24 = 72"),
    ("#### 72", "48 + 24 = 72 clips altogether."),
    ("#### 72", "<answer>72 clips</answer>"),
    ("#### 10", "<answer>$10</answer>"),
    ("#### 10", r"\boxed{\$10}"),
    ("#### 10", "<answer>10 dollars</answer>"),
    ("#### 10", "<answer>$10.00</answer>"),
    ("#### 10", "Weng earned $10."),
    ("#### 10", "$ 10"),
    ("#### 10", "<answer>10 $</answer>"),
    ("#### 1,450", "1450"),
    ("#### 1,450", "1,450.00"),
    ("#### 1450", r"\boxed{1{,}450}"),
    ("#### 1450", r"\boxed{1\,450}"),
    ("#### 1450", "<answer>\u20ac1,450</answer>"),
    ("#### -5", "\u22125"),
    ("#### -5", "-$5"),
    ("#### -5", "$-5"),
    ("#### -5", "- 5"),
    ("#### -5", "x = -5"),
    ("#### -5", "negative 5"),
    ("#### 5", "<answer>+5</answer>"),
    ("#### 50", "50%"),
    ("#### 50", r"\boxed{50\%}"),
    ("#### 50", "50 percent"),
    ("#### 5", "first 9, <answer> 5 apples </answer> then 8"),
    ("#### 5", "<answer>5"),
    ("#### 1104", "<answer>1104</answeranswer>"),
    ("#### 768", "<answer>768\ufffd"),
    ("#### 5", "<answer>4</answer> <answer>5</answer>"),
    ("#### 5", r"\boxed{1} \boxed{5}"),
    ("#### 5", r"<answer>\boxed{5}</answer>"),
    ("#### 5", "it is 7, no, 5"),
    ("#### 5", "Answer: 5"),
    ("#### 5", "<answer>\n5\n</answer>"),
    ("#### 7", "007"),
    ("#### 12345678", "12,345,678 people"),
    ("#### 5", "<answer>x = 5</answer>"),
    ("5", "Therefore, x = 5."),
    ("5", "Thus: $x = 5$"),
    ("5", "That is all (x = 5)"),
    ("#### 5", "$x=5$"),
    ("#### 5", "$$5$$"),
    ("#### 5", r"\(5\)"),
    ("#### 5", r"\[5\]"),
    ("#### 5", "<answer>10 - 5 = 5</answer>"),
    ("#### 5", "(5)"),
    ("#### 21", "the 21st"),
    # references of MATH, and the same number written differently
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", "0.5"),
    (r"\frac12", ".5"),
    (r"\dfrac{1}{2}", "0.50"),
    (r"\tfrac{3}{4}", r"\boxed{\frac34}"),
    (r"\frac{3}{4}", "6/8"),
    ("1/3", r"\frac{1}{3}"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac12"),
    (r"\frac1{72}", "1/72"),
    ("3 1/2", "3.5"),
    (r"3\frac{1}{2}", "7/2"),
    (r"3\frac12", "3 1/2"),
    ("-3 1/2", "-3.5"),
    (r"\frac{1,000}{2,000}", "1/2"),
    ("1,000/2,000", "0.5"),
    ("1 / 2", "0.5"),
    ("1.5e3", "1500"),
    ("1.5E+3", "1,500"),
    ("2x10^5", "200000"),
    (r"2\times10^{5}", "2e5"),
    (r"2 \cdot 10^5", "200,000"),
    ("2*10^5", "200000"),
    ("2 \u00d7 10\u2075", "200000"),
    ("10^{-3}", "0.001"),
    ("10^6", "1000000"),
    ("10**3", "1000"),
    ("1e-05", "0.00001"),
    ("25", "25 m^2"),
    ("25", r"25\text{ cm}^2"),
    ("25", r"25\,\text{cm}^2"),
    ("25", "25 cm\u00b2"),
    ("90", r"90^\circ"),
    ("90", r"90^{\circ}"),
    ("90", "90\u00b0"),
    ("60", "60 km/h"),
    ("60", "60 m/s"),
    ("5", "5cm"),
    ("5", r"\boxed{\text{5 apples}}"),
    ("5000000", "5 million"),
    ("5000000", "5 Million"),
    ("5000", "5 thousands"),
    ("2,500,000", "$2.5 million"),
    ("18", r"\boxed{18\text{ ways}}"),
    ("3", r"\boxed{x = 3}"),
    # as people and models write it
    ("-5", "<answer>\u20135</answer>"),
    ("-5", "The answer is \u20135."),
    ("-5", "$\u20135$"),
    ("-5", r"x = -\boxed{5}"),
    ("5", "`5`"),
    ("5", "*5*"),
    ("5", "5 \u2705"),
    ("5", r"\boxed {5}"),
    ("5", "<Answer>5</Answer>"),
    ("5", "2 + 3 = <<2+3=5>>5 apples"),
    ("500000", "5 hundred thousand"),
    ("25", "25\u00b0C"),
    ("25", r"25^\circ\text{C}"),
    ("18", "18\u00a2"),
    ("18", "\u20b918"),
    ("32", "The answer is 2^5 = 32."),
    ("25", "The area is 5^2 = 25 square feet."),
    ("4", r"\sqrt{16} = 4"),
    ("9", "2 + 3 = 5 and 5 + 4 = 9"),
    # a line that begins with #### and holds no answer is a heading of Markdown
    ("18", "#### Step 1\n9 + 9\n#### Step 2\nSo the answer is 18."),
    ("18", "#### 2. Add both\nThe answer is 18."),
    ("18", "#### Final Answer:\n18"),
    # thoughts do not count if anything follows them
    ("34", "so \\boxed{35}? no.</think>\n\nThe final answer is **34**."),
    ("34", "<think>\nThey want <answer>number</answer>.\n</think>\n\nThe answer is 34."),
    # words and units that are not variables; other forms of LaTeX
    ("5", "<answer>5 T-shirts</answer>"),
    ("12", "12 CDs"),
    ("60", "60 km / h"),
    ("60", r"60 \mathrm{~km} / \mathrm{h}"),
    ("20", "20 $cm^{2}$"),
    ("6", r"\boxed 6"),
    ("-12.5", r"\boxed -12.5"),
    ("-5", r"-\boxed 5"),
    ("-6", r"-\fbox{6}"),
    ("12", r"\fbox{Step 1} so \boxed{12}"),
    ("1/2", r"\boxed{{\frac12}}"),
    ("6", r"\boldsymbol{6}"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    ("34", "Thus, $p+q = 25 + 9 = 34$."),
    ("72", "It will cost $72 to feed everyone."),
    ("3", "3 do not have pets."),
    ("12", "12 third graders"),
    ("18", "So he pays.\n#### 18 - final answer"),
    ("18", "#### (18) dollars"),
    ("20", "Jess needs 25 \u2013 5 = 20 blocks."),
    ("8", "<answer>15 \u2014 7 = 8</answer>"),
    ("20", r"\boxed{x = \frac{60}{3} = 20}"),
    ("20", "Thus x = 60/3 = 20 minutes."),
    ("270", "So it will cost 10 x $27 = $270."),
    ("27", "60 x .45 = 27"),
    ("80", "(8/10) x 100 = 80"),
    ("34", "\u56e0\u6b64\uff0c\u7b54\u6848\u662f**34**\u3002"),
    ("34", "<answer>**34**\u4e2a</answer>"),
    ("25", r"25^{\circ} \mathrm{C}"),
    ("42", "**Final answer** - \\boxed{42}"),
    ("42", "**Final answer**\n\n- \\boxed{42}"),
    ("-5", r"The answer is -\boxed{5}."),
    ("-5", r"x = - \boxed{5}"),
    ("42", "The answer is\n- \\boxed{42}"),
    ("12", "#### 1) Cost\n3 * 4 = 12\n#### (2) Total\nThe answer is 12."),
    ("12", "#### 2 - Total\nThe answer is 12."),
    ("-1/2", "The answer is -\u00bd."),
    ("-1/2", "The answer is \u2212\u00bd."),
    ("-5", "The answer is $ - 5$."),
    ("-5", r"The answer is \( - 5 \)."),
    ("30", r"\theta = 30^\circ"),
    ("5", "So $x_1 = 5$."),
    ("7", "<answer>f(3) = 7</answer>"),
    ("12", r"\angle A = 12^\circ"),
    ("10000", "10\u202f000"),
    ("18", "18\u00ba"),
    ("18", "18\uff05"),
    ("18", "18 pcs"),
    ("18", "18 t-shirts"),
    ("200000", "2 lakh"),
]
OTHER_NUMBERS = [
    ("#### 72", "<answer>73</answer> 72"),
    ("#### 5", "-5"),
    ("#### 1450", "1.450"),
    ("#### 50", "0.5"),
    ("1/2", "1/3"),
    ("3 1/2", "1/2"),
    ("1.5e3", "3"),
    ("2x10^5", "10"),
    ("2x10^5", "2"),
    ("10^{-3}", "-3"),
    (r"\frac12", "12"),
    ("5 million", "5"),
    ("51/4", "Step 12\n3/4"),
]
# A formula contains numbers but is not a number, marked or not.
FORMULAS = [
    (r"\boxed{10 - 2\sqrt{5}}", r"\boxed{3+\sqrt{5}}"),
    (r"10 - 2\sqrt{5}", "5"),
    ("(1,2)", "(7,2)"),
    ("(1,2)", "2"),
    ("(1,200)", "1200"),
    ("x^2+1", "y-1"),
    ("x^2+1", "1"),
    (r"2\pi", "2"),
    (r"\pi/2", "2"),
    ("3:30", "30"),
    (r"\frac{\sqrt{3}}{2}", "2"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{5}}{2}"),
    (r"\frac{ab}{2}", "2"),
    ("2x", "2"),
    ("2ab", "2cd"),
    ("2 ab", "2"),
    ("5!", "5"),
    ("2^{10}", "10"),
    ("x_1", "1"),
    ("3+4i", "3"),
    ("3i", "3"),
    ("[1,5)", "5"),
    ("1, 2, 3", "3"),
    (r"3 \text{ or } 5", "5"),
    (r"x=3, y=5", "5"),
    (r"a, b = 5", "5"),
    (r"f(x = 5)", "5"),
    (r"3 \pm 5", "5"),
    ("x > 5", "5"),
    (r"x \le 5", "5"),
    ("x^2+y^2=25", "25"),
    ("x+2y-z=0", "0"),
    ("5x-y+2=0", r"\boxed{2x-y-3=0}"),
    ("x = 3; y = 5", "5"),
    ("x = 6, y = 2 + 3 = 5", "5"),
    ("x < y = 2 + 3 = 5", "5"),
    ("2; 3", "3"),
    ("5/0", "5"),
    ("1011_2", "1011"),
    (r"0.\overline{3}", "3"),
    (r"\log 5", "5"),
    ("sqrt(5)", "5"),
    ("f(5)", "5"),
    (r"\sqrt[3]{5}", "3"),
    ("y = 2x + 5", "5"),
    ("e^5", "5"),
    ("10-5", "5"),
    ("(3)-2", "2"),
    (r"x = 2 \text{ or } x = 3", r"x = 7 \text{ or } x = 3"),
    (r"x = -5 \text{ or } x = 5", "5"),
    ("x = 1 and y = 3", "3"),
    ("-(5)", "5"),
    (r"-\left(\frac{5}{2}\right)", "5/2"),
    ("0.333...", "0.333"),
    ("5 and a half", "5"),
    ("5 hours 30 minutes", "30"),
    ("3 feet and 6 inches", "6"),
    (r"$5 \text{ hours } 30 \text{ minutes}$", "30"),
    ("3 to one", "3"),
    ("2 to the tenth", "2"),
    (r"\sqrt x = 5", "5"),
    (r"\ln x = 2", "2"),
    ("x y = 12", "12"),
    ("2 kg 500 g", "500"),
    ("2 hours and a half", "2"),
    ("2 thirds", "2"),
    (r"\alpha = 5 \text{ and } \beta = 7", "7"),
    (r"x_1 = 5, x_2 = 7", "7"),
    (r"\alpha + \beta = 7", "7"),
]
# Texts without a number, or with a number that is only a part of something else.
NO_NUMBERS = [
    ("10%-20%", "20"),
    ("12/25/2020", "2020"),
    ("1.2.3", "3"),
    ("no number", "no number"),
    ("", ""),
    ("#### 5", "<answer>none</answer> 5"),
    ("#### 5", "<answer></answer> 5"),
    ("#### 5", "five"),
    ("9" * 5000, "9" * 5000),
    ("1e999999999", "1e999999999"),
    ("10^999999999", "10^999999999"),
    (r"\infty", r"\infty"),
    (r"\boxed{\text{width} = 5, \text{length} = 10}", "10"),
    ("<answer>half of 5</answer>", "5"),
    ("<answer>square root of 5</answer>", "5"),
    ("The answer is the square root of 5.", "5"),
    ("1 out of 6", "6"),
    ("3 in 4", "4"),
    ("5 plus 3", "3"),
    ("So it is 3 times 5.", "5"),
    ("5 dollars and 50 cents", "50"),
    ("$x - 18$", "-18"),
    ("5/xy", "5"),
    ("<answer>18\u4e07</answer>", "18"),
    ("The answer is 5 to 7.", "7"),
    ("18\u5c0f\u65f630\u5206\u949f", "30"),
]
DIFFERENT = OTHER_NUMBERS + FORMULAS + NO_NUMBERS
# fmt: on


def test_final_number_is_read_however_it_is_written():
    for number, texts in FINAL_NUMBERS.items():
        wanted = None if number is None else fractions.Fraction(number)
        for text in texts:
            found = answers.final_number(text)
            assert found == wanted, (text[:60], found, wanted)


@pytest.mark.parametrize("equal", [True, False])
def test_pairs_of_answers_are_equal_or_not(equal):
    for reference, answer in EQUAL if equal else DIFFERENT:
        found = train.correct({"answer": reference}, answer)
        assert found == equal, (reference[:60], answer[:60])
        # The comparison is symmetric: references may be marked in the same ways as answers.
        assert train.correct({"answer": answer}, reference) == equal, (answer[:60], reference[:60])
    assert len(EQUAL) + len(DIFFERENT) >= 150


@pytest.mark.parametrize(
    "reference",
    ["a - 1", "4 a ^ { 2 } - 3 a - 10", "$5$;$10$", "236 adult, 342 child", "2 cm and 3 cm",
     "$45 / 98$ meters, $30 / 49$ seconds", "$12 m^{2} n$", "AB=9, CD=4",
     r"AB = 9 \text{ and } CD = 4", "width = 5, length = 10", "width 5, length 10",
     "Alice: $5, Bob: $10", r"\text{base } 5, \text{ height } 10", r"\text{12 cm and 3 cm}",
     "June 1", "10 May 2012", r"\text{Jan. 30}"],
)  # fmt: skip
def test_a_reference_of_one_line_is_nothing_but_the_answer(reference):
    for answer in ("1", "10", "342", "3", "30/49", "12", "4", reference):
        assert train.correct({"answer": reference}, answer) == 0, answer


@pytest.mark.parametrize(
    "reference, number",
    [
        ("A box has 4 rows of 6 eggs, so there are 24 eggs.", "24"),
        ("3 * 4 = 12. The answer is 12.", "12"),
        ("**Solution.** There are 3 cats and 4 dogs, so the answer is 7.", "7"),
        ("I need 2 pans. The answer is 7.", "7"),
        ("the distance in the x-y plane is 5", "5"),
        ("4 + 3 = 7", "7"),
        ("B. 5", "5"),
    ],
)
def test_a_reference_may_be_a_worked_solution(reference, number):
    assert train.correct({"answer": reference}, number) == 1


def test_references_are_told_apart():
    for reference, kind in (
        ("5", "number"),
        ("x = 5 cm", "number"),
        ("#### 5", "number"),
        ("So, it is \\boxed{5}.", "number"),
        ("<think>So...</think>5", "number"),
        ("<think>" + "So... " * 10_000 + "</think>It is \\boxed{5}.", "number"),
        ("There are 5 of them.", "sentence"),
        ("We add 2 and 3.\nThis gives 5.", "sentence"),
        ("Distance = 60 * 2 = 120 miles", "sentence"),
        ("Profit = $5, so 5", "sentence"),
        ("Mary = 3, Bob = 4. So they have 7 in total.", "sentence"),
        ("Cost = 5, tax = 1\nTotal: 6", "sentence"),
        ("Cost = 3 * $1,200 = $3,600", "sentence"),
        ("He has 4, so he pays 5", "sentence"),
        ("June has 30 days", "sentence"),
        # A LaTeX command is not a word, but its text may be one.
        ("\\frac{1}{2}", "number"),
        ("$\\dfrac{9}{7}$", "number"),
        ("\\text{5 apples}", "number"),
        ("\\text{So there are 5}", "sentence"),
        ("\\text{Alice: }5,\\ \\text{Bob: }7", "other"),
        ("June 20", "other"),
        ("sales tax = 5, total = 15", "other"),
        ("\\sqrt{5}", "other"),
        ("AB = 9, CD = 4", "other"),
        ("no", "other"),
        # The tests of a program are not read.
        ("1 2 3\n" * 10_000, "other"),
    ):
        assert kind_of_reference(reference) == kind, reference[:50]


def test_thoughts_count_only_if_nothing_follows():
    assert train.correct({"answer": "34"}, "It is 34.\n</think>\n") == 1
    assert train.correct({"answer": "7"}, "So it is 7</think>") == 1
    quoted = "They want <answer>number</answer>. 3+31=34.</think>\n\n<answer>34</answer>"
    assert train.formatted({}, quoted) == 1
    assert train.formatted({}, "<answer>1</answer></think><answer>3</answer> <answer>4") == 0
    assert answers.final_number("4</think><answer>3</answer></think>5") == 5


def test_a_marked_answer_is_read_like_one_that_stands_alone():
    # Skip texts that are marked already, and sentences with more than one number.
    alone_only = ("####", "boxed", "answer", " = 72", ", no")
    for text in itertools.chain(*EQUAL):
        if any(part in text.lower() for part in alone_only):
            continue
        wanted = answers.final_number(text)
        assert answers.final_number(f"so <answer>{text}</answer>") == wanted, text
    for formula, _ in FORMULAS:
        assert answers.final_number(f"<answer>{formula}</answer>") is None, formula
        assert answers.final_number(rf"it is $\boxed{{{formula}}}$") is None, formula


def test_every_answer_of_gsm8k_is_its_number(record_property):
    rows = []
    for part in ("train", "test"):
        rows += read_jsonl(shared(f"gsm8k/{part}.jsonl"))
    for row in rows:
        marked = row["answer"].split("####")[1].strip().replace(",", "")
        assert answers.final_number(row["answer"]) == fractions.Fraction(marked), row["answer"]
        assert train.correct(row, row["answer"]) == 1
    assert len(rows) == 8792
    record_property("solutions", len(rows))
