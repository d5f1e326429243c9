"""The words that the demo model's data is made of. Knows nothing of prompts; used by `kinds.py` and `data.py`."""
# ruff: noqa: SIM905 - lists of plain words read better as text

from __future__ import annotations

import random

NAMES = """
Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Maria Noah Olga Paul Quinn Rosa Sam Tina Uma Victor Wendy
Xavier Yara Zoë Tomáš Jiří Věra Łukasz Søren José Chloé Jürgen 민수 지우 서연
""".split()
CITIES = """
Prague Brno Berlin Paris Lyon Madrid Rome Milan Vienna Oslo Cairo Seoul Tokyo Lima Boston Dublin London Lisbon Athens
Warsaw Helsinki Nairobi Sydney Toronto Havana Delhi Zürich Kraków Málaga Göteborg Plzeň Tromsø 부산 제주
""".split()

LANGUAGES = ("Czech", "German", "Korean")
_TRANSLATIONS = """
apple jablko Apfel 사과 | bear medvěd Bär 곰 | bicycle kolo Fahrrad 자전거 | bird pták Vogel 새 |
book kniha Buch 책 | bread chléb Brot 빵 | bridge most Brücke 다리 | butter máslo Butter 버터 |
car auto Auto 자동차 | cat kočka Katze 고양이 | chair židle Stuhl 의자 | cheese sýr Käse 치즈 |
city město Stadt 도시 | cloud mrak Wolke 구름 | coffee káva Kaffee 커피 | dog pes Hund 개 |
door dveře Tür 문 | egg vejce Ei 달걀 | eye oko Auge 눈 | father otec Vater 아버지 |
fire oheň Feuer 불 | fish ryba Fisch 물고기 | flower květina Blume 꽃 | forest les Wald 숲 |
friend přítel Freund 친구 | garden zahrada Garten 정원 | gold zlato Gold 금 | hand ruka Hand 손 |
heart srdce Herz 심장 | horse kůň Pferd 말 | house dům Haus 집 | island ostrov Insel 섬 |
key klíč Schlüssel 열쇠 | king král König 왕 | letter dopis Brief 편지 | milk mléko Milch 우유 |
moon měsíc Mond 달 | mother matka Mutter 어머니 | mountain hora Berg 산 | music hudba Musik 음악 |
night noc Nacht 밤 | potato brambora Kartoffel 감자 | rain déšť Regen 비 | river řeka Fluss 강 |
salt sůl Salz 소금 | school škola Schule 학교 | sea moře Meer 바다 | snow sníh Schnee 눈 |
star hvězda Stern 별 | stone kámen Stein 돌 | sun slunce Sonne 태양 | table stůl Tisch 탁자 |
tea čaj Tee 차 | time čas Zeit 시간 | train vlak Zug 기차 | tree strom Baum 나무 |
water voda Wasser 물 | window okno Fenster 창문
"""
# English word -> its translation in each of LANGUAGES.
DICTIONARY = {english: foreign for english, *foreign in (entry.split() for entry in _TRANSLATIONS.split("|"))}

_OTHER_WORDS = """
anchor arrow autumn bakery ballet banana basket beacon blanket bottle branch breeze bronze bucket cabin camera candle
canvas carpet carrot castle cherry circle cliff clock cobalt comet copper coral cotton cousin crystal dancer desert
diamond dolphin dragon drawer eagle echo ember engine fabric falcon feather fence fiddle flame flute fossil fountain
galaxy ginger glacier grape guitar hammer harbor harvest helmet hollow honey hunter ice insect ivory jacket jelly jewel
journey jungle kettle kitchen ladder lagoon lamp lantern lemon library lion lizard magnet mango maple marble meadow
melon mirror monkey needle nest nickel ocean olive onion orange orchid otter owl paddle palace paper parrot pearl pencil
pepper piano pillow pirate planet plum pocket puzzle quartz rabbit raven ribbon robin rocket saddle sailor salmon shadow
shovel silver singer spider spoon spring squirrel strawberry summer sweater temple thunder tiger tomato tower tulip
tunnel turtle umbrella valley velvet village violin volcano wagon walnut whale wheel willow winter wizard yellow zebra
"""
WORDS = sorted({*DICTIONARY, *_OTHER_WORDS.split()})

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

GOODS = """
phone blender book film hotel restaurant headset jacket keyboard lamp vacuum camera game sofa watch bike tent
""".split()
PARTS = "quality design price service support delivery packaging manual staff finish".split()
PRAISE = """
great excellent wonderful fantastic lovely superb brilliant amazing perfect delightful good impressive
""".split()
BLAME = "terrible awful horrible dreadful poor disappointing useless broken bad ugly annoying mediocre".split()
PRAISE_REMARKS = (
    """
I love it.|I would buy it again.|It works perfectly.|It made my day.|I recommend it to everyone.|Worth every cent.|
My family is very happy with it.|It exceeded my expectations.|I never had a problem with it.|Five stars from me.
""".strip()
    .replace("\n", "")
    .split("|")
)
BLAME_REMARKS = (
    """
I hate it.|I want my money back.|It broke after two days.|It ruined my weekend.|I warn everyone about it.|
A waste of money.|My family is very unhappy with it.|It never worked.|I sent it back at once.|One star from me.
""".strip()
    .replace("\n", "")
    .split("|")
)

_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen
""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def number_in_words(number: int) -> str:
    """English words for 0 <= number < 10,000, such as "two thousand three hundred forty-five"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    value, unit = (1000, "thousand") if number >= 1000 else (100, "hundred")
    high, rest = divmod(number, value)
    return f"{_ONES[high]} {unit}" + (f" {number_in_words(rest)}" if rest else "")


def made_up_word(rng: random.Random) -> str:
    """A pronounceable word of 3 to 7 letters, seldom a real one: so that spelling is learned and not a list."""
    num_syllables = rng.randint(1, 3)
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy") for _ in range(num_syllables))
    return "".join(syllables) + rng.choice("bdfgklmnprstxz")


def any_word(rng: random.Random) -> str:
    """A word of the list or, one time in four, a made-up one."""
    return made_up_word(rng) if rng.random() < 0.25 else rng.choice(WORDS)
