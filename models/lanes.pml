/* One lane: who owns it, who sends for it, and whose word about it counts.

   Promise: whatever relays do and however long they stand still, a committed message is delivered
   or waits in the tables, first deliveries of a key keep their order, and a relay that has lost the
   lane changes nothing any more.

   Three messages of one key, committed one after the other; a set of them is a byte. Nothing makes
   a relay take its next step, so it may stand still between any two for any time, lose its lease
   meanwhile, and go on as if nothing had happened.

   Broken on purpose, so that the properties are seen to fail:
     -DNO_FENCE      settle whatever the owner and the epoch of the lane are
     -DTWO_STEPS     look at the fence, then change: EXISTS (...) under READ COMMITTED
     -DSETTLE_FIRST  settle before the receipt
     -DNOT_HELD      later messages of a held key are sent
   -DOUTCOMES leaves out the check that a stale relay changes nothing, and so shows what it costs. */

#define RELAYS   2
#define TAKES    3      /* how often the lane is taken, and */
#define REFUSALS 2      /* how often a send is refused, in all: bounds of the search */
#define NOBODY   255

#define BIT(m)      (1 << (m))
#define LOWEST(set) (((set) & 1) -> 0 : (((set) & 2) -> 1 : 2))

/* What the database knows. */
byte outbox, held;      /* committed, and not yet settled */
byte owner = NOBODY;
byte epoch;
bool leased;

/* What only we know. */
byte committed, arrived;
byte takes, refusals;

#define MINE (owner == _pid && epoch == my_epoch)
#ifdef NO_FENCE
#define FENCE true
#else
#define FENCE MINE
#endif

inline commit(m) { atomic { outbox = outbox | BIT(m); committed = committed | BIT(m) } }

active proctype publisher() {
    commit(0);
    commit(1);
    commit(2)
}

/* A lease ends whenever it likes, but for the last one. */
active proctype lease() {
    do
    :: atomic { leased && takes < TAKES -> leased = false }
    :: takes == TAKES -> break
    od
}

/* A first delivery comes after those of all earlier messages. */
inline arrive(m) {
    assert((arrived & BIT(m)) || (arrived & (BIT(m) - 1)) == BIT(m) - 1);
    arrived = arrived | BIT(m)
}

/* What a settle changes, if the fence stands: `away` leaves the outbox or held, and what of `wait`
   is in the outbox is held from now on. Nothing goes away that has not arrived. */
inline apply(away, wait) {
#ifndef OUTCOMES
    assert(MINE || (!(outbox & (away | wait)) && !(held & away)));
#endif
    assert((arrived & (away)) == (away));
    if
    :: from_held -> held = held & ~(away)
    :: else -> outbox = outbox & ~(away)
    fi;
    held = held | (outbox & (wait));
    outbox = outbox & ~(wait);
    any_held = any_held || (wait)
}

/* One statement. A relay that finds the lane taken drops all it knows. */
inline settle(away, wait) {
#ifdef TWO_STEPS
    still = FENCE;
#define STANDS still
#else
#define STANDS FENCE
#endif
    atomic {
        if
        :: STANDS -> apply(away, wait)
        :: else -> my_epoch = 0; batch = 0
        fi
    }
}

/* The first of `batch`. It looks at its lease, and may stand still right after. */
inline send_one() {
    atomic {
        m = LOWEST(batch);
        batch = batch & ~BIT(m);
        if
        :: leased && MINE
        :: else -> my_epoch = 0; batch = 0
        fi
    };
    if
    :: my_epoch == 0
    :: else ->
#ifdef SETTLE_FIRST
        settle(BIT(m), 0);
#endif
        if
        :: atomic { arrive(m) };
#ifndef SETTLE_FIRST
           settle(BIT(m), 0)
#endif
        :: atomic { refusals < REFUSALS -> refusals++; behind = BIT(m) | batch; batch = 0 };
           settle(0, behind)
        fi
    fi
}

inline send_all() {
    do
    :: my_epoch && batch -> send_one()
    :: else -> break
    od;
    atomic { batch = 0; m = 0; behind = 0; still = false; from_held = false }
}

active [RELAYS] proctype relay() {
    byte my_epoch, m, batch, behind;
    bool any_held, from_held, still;

    do
    :: atomic {
        !leased && takes < TAKES ->
        owner = _pid; epoch++; my_epoch = epoch; leased = true; takes++;
        any_held = (held != 0)
    }
    /* Now and then it notices that something is held, or is not any more. */
    :: atomic { my_epoch && any_held != (held != 0) -> any_held = (held != 0) }
    /* The head of the held key, from where it waits. */
    :: atomic {
        my_epoch && any_held && held ->
        from_held = true;
        batch = BIT(LOWEST(held))
    };
       send_all()
    /* The outbox; while the key is held, what is read joins it. */
    :: atomic {
        my_epoch && outbox ->
        batch = outbox;
#ifndef NOT_HELD
        if
        :: any_held && held -> behind = batch; batch = 0
        :: else
        fi
#endif
    };
       if
       :: behind -> settle(0, behind)
       :: else
       fi;
       send_all()
    od
}

/* When nothing can happen any more, the last owner has sent and settled everything. */
active proctype judge() {
    timeout -> assert(outbox == 0 && held == 0 && arrived == committed)
}
