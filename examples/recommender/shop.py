"""A simulated shop: visitors from three countries, four offers, and tastes to learn.

python examples/recommender/shop.py > log.csv    # 4,000 visits with random offers
"""

from __future__ import annotations

import csv
import random
import sys

OFFERS = ["books", "games", "shoes", "tools"]
FAVOURITE = {"DE": "tools", "FR": "shoes", "IT": "games"}


def visitor(rng: random.Random) -> dict[str, str]:
    """A new visitor."""
    return {"country": rng.choice(list(FAVOURITE)), "account": rng.choice(["new", "old"])}


def buys(someone: dict[str, str], offer: str, rng: random.Random) -> bool:
    """Whether they buy the offer: their country's favourite or, with an old account, books."""
    likes_books = someone["account"] == "old" and offer == "books"
    likes_it = likes_books or offer == FAVOURITE[someone["country"]]
    return rng.random() < (0.30 if likes_it else 0.10)


if __name__ == "__main__":
    rng = random.Random(1)
    table = csv.writer(sys.stdout)
    table.writerow(["time", "country", "account", "offer", "probability", "bought"])
    for number in range(4000):
        someone, offer = visitor(rng), rng.choice(OFFERS)
        time = f"2026-11-22T{number // 200:02}:{number % 60:02}:00Z"
        bought = int(buys(someone, offer, rng))
        table.writerow([time, *someone.values(), offer, 1 / len(OFFERS), bought])
