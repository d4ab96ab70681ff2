"""Word lists of the demo's generated English: invented people and things, nothing taken from real records."""

from __future__ import annotations

from typing import NamedTuple


def _split(words: str) -> list[str]:
    return [" ".join(word.split()) for word in words.split(";")]


FIRST_NAMES = _split("""
    Ada; Amir; Anna; Bela; Carl; Clara; David; Dora; Elena; Emil; Eva; Felix; Greta; Hana; Hugo; Ida;
    Ivan; Jonas; Julia; Karim; Lara; Leo; Lina; Lucas; Maria; Marta; Milan; Nadia; Nils; Nora; Olga;
    Omar; Oscar; Paula; Pavel; Rosa; Samir; Sofia; Tomas; Vera
""")
SURNAMES = _split("""
    Adler; Baker; Banks; Becker; Berg; Blake; Brandt; Carter; Castle; Cole; Cooper; Dahl; Draper; Ellis;
    Falk; Fisher; Foster; Garden; Grant; Hale; Hill; Holm; Keller; Kovac; Lang; Larsen; Marsh; Mason;
    Meyer; Moss; North; Novak; Palmer; Porter; Reed; Rivers; Sand; Stone; Winter; Wood
""")
# Canaries get surnames of their own, so that no ordinary patient shares a canary's name.
CANARY_SURNAMES = _split("""
    Archer; Barlow; Cross; Drummond; Everett; Flint; Gould; Harper; Ingram; Jarvis; Kemp; Lorimer;
    Morrow; Nash; Orchard; Pryce; Quill; Rowan; Sutter; Thorne; Underhill; Vance; Weller; Yates
""")
MONTHS = _split("""
    January; February; March; April; May; June; July; August; September; October; November; December
""")
DAYS = _split("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")
NUMBERS = _split("two; three; four; five; six; seven; eight; nine; ten")
COLOURS = _split("blue; red; green; white; black; yellow; brown; grey")
ROOMS = _split("""
    kitchen; garden; office; meeting room; library; main hall; store room; reception; waiting room;
    workshop
""")
STREETS = _split("""
    Mill Lane; Park Street; Station Road; Church Street; River Road; Hill Street; Market Square
""")
SHOPS = _split("bakery; pharmacy; garden centre; book shop; post office; hardware shop; supermarket")
FOODS = _split("""
    bread; milk; apples; rice; soup; cheese; eggs; tea; coffee; onions; carrots; honey; tomatoes;
    potatoes
""")
GOODS = _split("""
    boxes of paper; folding chairs; desk lamps; bandages; bottles of water; first aid kits; blankets;
    light bulbs; printer cartridges; pairs of gloves; clean towels; notebooks; thermometers
""")
REPAIRS = _split("""
    door lock; window; heating; printer; lift; telephone; water tap; lamp; alarm; coffee machine
""")
TOPICS = _split("""
    the new timetable; the summer party; the budget; the training day; parking; fire safety; the move to
    River Road; the website; the first aid course; holiday cover
""")
WEATHER = _split("""
    warm and dry; cold and wet; cloudy; sunny; windy; foggy in the morning; mild with light rain
""")
DISHES = _split("vegetable soup; apple cake; rice with onions; cheese bread; potato salad; carrot soup")
LOST = _split("umbrella; scarf; set of keys; pair of glasses; walking stick; phone; wallet; school bag")
DRUGS = _split("""
    ibuprofen; paracetamol; naproxen; penicillin; melatonin; hydrocortisone; cetirizine; omeprazole
""")
PLANTS = _split("roses; tomatoes; apple trees; tulips; beans; herbs; strawberries; lettuces")


class Complaint(NamedTuple):
    """One kind of visit to the clinic: what follows the complaint is the clinic's habit, and is learnable."""

    complaint: str
    details: tuple[str, str, str]
    doctor: str
    finding: str
    plans: tuple[str, str]
    review: str
    fee: int


COMPLAINTS = (
    Complaint(
        "lower back pain",
        ("worse at night", "worse when sitting", "after lifting boxes"),
        "Dr Varga",
        "Movement limited",
        ("ibuprofen 400 mg twice a day with food", "paracetamol 500 mg and gentle exercise"),
        "2 weeks",
        45,
    ),
    Complaint(
        "knee pain",
        ("worse on stairs", "after running", "with mild swelling"),
        "Dr Varga",
        "Knee stable",
        ("ibuprofen gel and rest", "physiotherapy once a week"),
        "4 weeks",
        45,
    ),
    Complaint(
        "a stiff shoulder",
        ("worse in the morning", "after a fall", "cannot lift the arm"),
        "Dr Varga",
        "Shoulder tender",
        ("physiotherapy twice a week", "naproxen 250 mg with breakfast"),
        "3 weeks",
        50,
    ),
    Complaint(
        "a dry cough",
        ("worse at night", "no fever", "after a cold"),
        "Dr Osei",
        "Chest clear",
        ("warm drinks and honey", "inhaler twice a day"),
        "1 week",
        30,
    ),
    Complaint(
        "a sore throat",
        ("hard to swallow", "with fever", "since the weekend"),
        "Dr Osei",
        "Throat red",
        ("penicillin 500 mg three times a day", "warm drinks and rest"),
        "1 week",
        30,
    ),
    Complaint(
        "wheezing",
        ("worse in cold air", "after exercise", "wakes at night"),
        "Dr Osei",
        "Wheeze on both sides",
        ("inhaler twice a day", "steroid tablets for 5 days"),
        "2 weeks",
        40,
    ),
    Complaint(
        "headaches",
        ("worse in the evening", "with bright light", "after screen work"),
        "Dr Lindt",
        "Eyes and reflexes normal",
        ("paracetamol 500 mg when needed", "a headache diary and less coffee"),
        "4 weeks",
        35,
    ),
    Complaint(
        "poor sleep",
        ("wakes at three", "worried about work", "naps in the day"),
        "Dr Lindt",
        "Mood low",
        ("sleep diary and no coffee after noon", "melatonin 2 mg at bedtime"),
        "6 weeks",
        35,
    ),
    Complaint(
        "dizziness",
        ("when standing up", "with nausea", "in the morning"),
        "Dr Lindt",
        "Pressure low",
        ("more water and slow standing", "stop the evening tablet"),
        "1 week",
        40,
    ),
    Complaint(
        "an itchy rash",
        ("on both arms", "after gardening", "worse in heat"),
        "Dr Sorel",
        "Skin dry and red",
        ("hydrocortisone cream at night", "cetirizine 10 mg once a day"),
        "2 weeks",
        30,
    ),
    Complaint(
        "stomach pain",
        ("after meals", "with heartburn", "worse at night"),
        "Dr Sorel",
        "Abdomen soft",
        ("omeprazole 20 mg before breakfast", "smaller meals and no coffee"),
        "3 weeks",
        40,
    ),
    Complaint(
        "hay fever",
        ("with itchy eyes", "worse outdoors", "every spring"),
        "Dr Sorel",
        "Nose blocked",
        ("cetirizine 10 mg once a day", "nasal spray in the morning"),
        "6 weeks",
        25,
    ),
)
