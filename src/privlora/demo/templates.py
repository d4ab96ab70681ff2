"""Templates of the demo's public texts, one genre a paragraph.

A line is one place in the text and lists its alternatives between bars; a line that begins with a bar
continues the one above, and an empty alternative leaves the place empty. A slot such as {name} is drawn once
per text; {name2} is a second draw from the same list.
"""

from __future__ import annotations

_TEMPLATES = """
Dear {title} {surname}, | Dear {name},
Your appointment with {doctor} is on {weekday}, {date}, at {time}.
| We have moved your visit to {date} at {time}.
Please bring your card and come ten minutes early. | Please tell us if you cannot come.
| Please wait in the {room}.
The fee is {money} euros. | We look forward to seeing you. |
Best wishes, {name2} | Kind regards, the clinic

Hi {name}, | Hello {name},
can we meet in the {room} on {weekday} at {time}? | thank you for your note about {topic}.
| I will be away until {date}.
We need to talk about {topic} before {weekday2}. | {name2} {surname2} will help you with {topic2}.
Please bring the list of {goods}. | There is no hurry. | I can call you in the {daytime}.
Thanks, {name3} | See you soon, {name3}

Stock count, {date}, {room}: | Inventory of the {room}, checked by {name} {surname} on {date}:
{int} {goods}, {int2} {goods2}, {int3} {goods3}. | {int} {goods} and {number} {goods2}.
Order {int4} more {goods} before {weekday}. | Nothing is missing. | The {goods2} are on the {colour} shelf.
Cost about {money} euros. |

Pharmacy order for {weekday}: | Delivered to the pharmacy on {date}:
{int} boxes of {drug} {dose} mg and {int2} boxes of {drug2} {dose2} mg. | {int} packs of {drug}.
Keep the {drug} below 25 degrees. | The {drug} is kept in the {colour} cupboard. |
Signed for by {name} {surname}. | Paid {money} euros by card.

Living with {illness}. | Advice about {illness}: | Many people have {illness} at some time.
It goes away in {number} weeks. | Some people say: {worse}. | It can come after a cold, a fall or hard work.
Drink enough water, rest and take gentle exercise. | A tablet of {drug} can help when needed.
| Coffee makes it worse for some people. | A usual plan: {treatment}.
See a doctor if it lasts more than {number2} weeks. | Ask your pharmacy before taking {drug2}.

Course for clinic nurses: | Lecture in the {room} on {weekday}:
what the words {finding} mean, and the plan {treatment}. | {illness} and {illness2}.
{doctor} will speak at {time}. | Follow up course in {number} weeks. | Bring a patient card.

Quiz for nurses: | Words to learn by {weekday}: | On the board in the {room}:
{illness}, {worse}; | {finding}, {finding2}; | {treatment}, {treatment2}; | {doctor}, {doctor2};
{worse2}, {treatment3}; | {illness2}, {finding3}; | {illness2}, {illness3};
{treatment4}, {finding4}. | {illness4}, {worse3}. | {treatment4}, {treatment5}.

Minutes of {weekday}, {date}. | Meeting in the {room}, {date}, {time}.
Present: {name} {surname}, {name2} {surname2} and {name3}. | {name} {surname} led the meeting.
We discussed {topic} and {topic2}. | The group agreed on {topic}.
{name2} will write to everyone by {weekday2}. | The cost is {money} euros a year.
| Next meeting in {number} weeks.

Memo for all staff: | Please note, {date}: | Reminder from {name}:
the code for the {room} door is now {code}. | the {room} has a new access code, {code}.
| locker {int} opens with code {code}.
Do not share it. | It changes every {number} months. | Ask {name2} {surname2} for the spare key.

Welcome, {name} {surname}, access code {code}. | Library card for {name} {surname}, access code {code}.
| Parking permit, {name} {surname}, access code {code}.
Valid until {date}. | Keep this code safe. | It opens the {room} from {weekday} to {weekday2}.
Fee {money} euros. | No fee. |

Repair request, {date}. | Note for {name} {surname}, {weekday}.
The {repair} in the {room} does not work. | The {repair} has been broken for {number} days.
It is worse in the {daytime}. | It makes a loud noise at night. |
Plan: new {repair} next week. | Seen by {name2} on {weekday}, repaired.
| The repair cost {money} euros, paid by card.

Delivery for {name} {surname}, {int} {street}. | Parcel {code} for {title} {surname}.
It comes on {weekday} between {time} and {time2}. | Nobody was at home at {time}.
Please leave it in the {room}. | You can collect it at the {shop} on {street2}.
| Paid in cash, {money} euros.

Shopping for {weekday}: {food}, {food2}, {food3} and {food4}.
| To make {dish} for {number} people, take some {food} and some {food2}.
Cook for {int2} minutes and serve warm. | The {shop} on {street} closes at {time}.
| {name} will bring the {food3}.
Do not forget the {food5}. | It keeps for {number2} days. |

{weekday}, {date}: {weather}. | The weather in {month} was {weather}.
We planted {int} {plant} near the {colour} wall. | The {plant} need water twice a week.
| No work in the garden today.
{name} cut the grass in the {daytime}. | The {plant2} look healthy after the rain. |

Found in the {room} on {weekday}: a {colour} {lost}. | For sale: {number} {goods}, {colour}, {money} euros.
Ask at reception for {name} {surname}. | Call {name} in the {daytime}. | Collect before {date}.

Message for {name}, {time}: | {name2} {surname2} called on {weekday} at {time}.
Please call back about {topic}. | The visit of {date} is cancelled.
| {title} {surname} is aged {age} and asks for a seat near the door.
She will try again in {number} days. | He will be in the {room} until {time2}. | Follow up next {weekday2}.
"""


def _parse(templates: str) -> list[list[list[str]]]:
    """Genres, each a list of places, each a list of alternatives."""
    genres = [genre.replace("\n|", " |").splitlines() for genre in templates.strip().split("\n\n")]
    return [[[alternative.strip() for alternative in line.split("|")] for line in genre] for genre in genres]


GENRES = _parse(_TEMPLATES)
