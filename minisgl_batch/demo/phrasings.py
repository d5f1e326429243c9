"""How each kind of question is asked: one phrasing a line, fields in braces, ⏎ for a line break. Used by `kinds.py`."""

from __future__ import annotations


def _lines(text: str) -> list[str]:
    return [line.replace("⏎", "\n") for line in text.strip().splitlines()]


SUM = _lines("""
What is {a} + {b}?
{a} + {b} =
Add {a} and {b}.
Compute {a} + {b}.
How much is {a} plus {b}?
What is the sum of {a} and {b}?
{name} has {a} coins and gets {b} more. How many coins does {name} have now?
""")
DIFFERENCE = _lines("""
What is {a} - {b}?
{a} - {b} =
Subtract {b} from {a}.
Compute {a} - {b}.
How much is {a} minus {b}?
""")
SPENDING = "{name} had {a} coins and spent {b}. How many coins are left?"

NUMBER_TO_WORDS = _lines("""
Write {number} in words.
Write the number {number} as words.
How do you say {number} in English?
Spell out the number {number}.
{number} in words:
""")
WORDS_TO_NUMBER = _lines("""
Write {number} in digits.
Write the number {number} with digits.
Which number is {number}?
Convert to digits: {number}
{number} as a number:
""")

SORT_NUMBERS = _lines("""
Sort these numbers {order}: {items}
Put {items} {order}.
List the numbers {items} {order}.
Order {order}: {items}
""")
ASCENDING = ["in ascending order", "from smallest to largest"]
DESCENDING = ["in descending order", "from largest to smallest"]
SORT_WORDS = _lines("""
Sort these words alphabetically: {items}
Put these words in alphabetical order: {items}
Order the words {items} from A to Z.
Alphabetize: {items}
What is the alphabetical order of {items}?
""")

WORD_LENGTH = _lines("""
How many letters are in the word {word}?
How many letters does {word} have?
Count the letters of {word}.
How long is the word {word}?
""")
COUNT_LETTER = _lines("""
How many times does the letter {letter} occur in {word}?
How often is {letter} in the word {word}?
Count the letter {letter} in {word}.
How many {letter}'s are in {word}?
""")
COUNT_ITEMS = _lines("""
How many items are in this list: {items}
Count the items: {items}
How many things are listed here? {items}
The list is {items}. How many entries does it have?
""")

CALENDAR = _lines("""
What {unit} comes {span} {side} {start}?
Which {unit} is {span} {side} {start}?
{name} thinks of the {unit} {span} {side} {start}. Which {unit} is it?
""")
CALENDAR_AFTER = _lines("""
{name} starts on a {start} and is back {span} later. Which {unit} is it then?
It is {start} now. What {unit} is it in {span}?
""")
CALENDAR_BEFORE = _lines("""
{name} came {span} ago and now it is {start}. Which {unit} was it then?
It is {start} now. What {unit} was it {span} ago?
""")

PICK = _lines("""
Which number is the {word}: {items}?
Pick the {word} number: {items}
What is the {word} of {items}?
Find the {word} value in {items}.
""")

SENTIMENT = _lines("""
Is this review positive or negative? {review}
Classify the sentiment of the review as positive or negative.⏎{review}
Review: {review}⏎Sentiment:
What is the sentiment of this text: {review}
{review} Was the customer's opinion positive or negative?
""")
OPINIONS = _lines("""
The {good} is {adjective}.
The {part} of this {good} is {adjective}.
The {part} is {adjective} and the {other_part} is {other_adjective}.
This {good} is not {opposite} at all.
I bought this {good} for {name} and it is {adjective}.
{name} says that the {good} is {adjective}.
""")

EXTRACT = _lines("""
Extract name, city and age as JSON: {text}
Give the name, city and age as JSON.⏎{text}
Text: {text}⏎Return JSON with name, city and age.
{text} Write name, city and age as JSON.
""")
PERSON = _lines("""
{name} is {age} years old and lives in {city}.
My name is {name}, I am {age} and I live in {city}.
{name} from {city} is {age}.
{name}, {age}, comes from {city}.
At the age of {age}, {name} moved to {city}.
In {city} there lives a {age}-year-old person called {name}.
Our colleague {name} turned {age} last week and works in {city}.
""")

REVERSE = _lines("""
Reverse the word {word}.
Write {word} backwards.
Spell {word} from back to front.
What is {word} spelled backwards?
Reverse: {word}
Turn around the letters of {word}.
""")
UPPER_CASE = _lines("""
Write in capital letters: {text}
Convert to upper case: {text}
Upper-case the text {text}
Put {text} in capital letters.
Make all letters of {text} upper case.
""")

TRANSLATE = _lines("""
Translate to {language}: {items}
Translate into {language}: {items}
What is {items} in {language}?
How do you say {items} in {language}?
Give the {language} for {items}.
{language} for {items}:
""")

SYSTEM = _lines("""
You are a helpful assistant.
You are a careful and honest assistant.
You are an expert in many fields.
Answer briefly.
Answer with the result only.
Be polite and precise.
Do not explain your answer.
Think before you answer.
The user is a student.
The user is in a hurry.
Follow the instruction of the user exactly.
Never make things up.
You work for a small company that sells garden tools.
You label data for a research project.
Keep the format simple.
Every answer goes into a table, so write nothing but the answer.
If you are not sure, give your best answer.
Always answer in English unless you are asked for another language.
""")
