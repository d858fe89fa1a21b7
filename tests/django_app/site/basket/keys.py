"""The shop's idempotency keys, on the database of DATABASES."""

from postroom.idempotency import SHARED, Keys, Policy

keys = Keys(using="default", scope=SHARED, policies={"POST /place/{number}": Policy()})
