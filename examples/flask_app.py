"""An order service with Flask and Flask-SQLAlchemy: an order and its message are one commit.

pip install postroom flask flask-sqlalchemy
postroom db install --database sqlite:///shop.db
python flask_app.py
curl localhost:5000/orders --json '{"total": "9.90"}'
postroom relay --database sqlite:///shop.db --broker stdout://
"""

import os
from dataclasses import dataclass
from pathlib import Path

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from postroom import Outbox, message

# Flask-SQLAlchemy looks for a relative SQLite path in a folder of its own, so it is made absolute.
DATABASE_URL = os.environ.get("DATABASE_URL", f"sqlite:///{Path('shop.db').absolute()}")

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = DATABASE_URL
db = SQLAlchemy(app)
outbox = Outbox()


class Order(db.Model):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[str]


@message("order.placed.v1", topic="orders", key_field="order_id")
@dataclass
class OrderPlaced:
    order_id: int
    total: str


@app.post("/orders")
def place_order() -> tuple[dict[str, int], int]:
    order = Order(total=request.get_json()["total"])
    db.session.add(order)
    db.session.flush()  # now the order has its id
    outbox.publish(db.session, OrderPlaced(order.id, order.total))
    db.session.commit()  # both, or neither
    return {"id": order.id}, 201


if __name__ == "__main__":
    with app.app_context():
        db.create_all()
    app.run(port=int(os.environ.get("PORT", "5000")))
