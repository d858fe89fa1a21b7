/* Where a read may start: the safe watermark of rules.Horizon, against publishers that commit late.

   Promise: nothing committed is ever left behind the watermark, and of one key nothing is read
   after something that was published when it had already been committed.

   Four positions, each taken by a transaction of its own that may commit or be rolled back at any
   later time; 0 and 3 have one key, and whoever takes 3 waits for the end of 0. A publisher holds
   its lock from before it takes its position until its commit is visible, and a moment longer.
   Reads and looks come in steps, between which anything may happen.

   Broken on purpose: -DLAST_READ, the watermark is the last position read;
                      -DNO_SECOND_READ, it moves with the look, and not with a read begun after.  */

#define BIT(m) (1 << (m))
#define TOP(set) (((set) & 8) -> 4 : (((set) & 4) -> 3 : (((set) & 2) -> 2 : (((set) & 1) -> 1 : 0))))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

byte locks, outbox, over, taken, committed, seen_ever;

/* Positions are given out in order, whoever asks. */
inline transaction(m) {
    locks = locks | BIT(m);
    atomic { taken == m -> taken++ };
    if
    :: atomic { outbox = outbox | BIT(m); committed = committed | BIT(m); over = over | BIT(m) }
    :: over = over | BIT(m)
    fi;
    locks = locks & ~BIT(m)
}

active proctype first()  { transaction(0) }
active proctype second() { transaction(1) }
active proctype third()  { transaction(2) }
active proctype fourth() { over & BIT(0); transaction(3) }

active proctype relay() {
    byte safe, begun, last, batch;
    byte seen, noted, passed, mark, answer, noted_open;

    do
    /* A read begins, sees what is there, and returns; what it saw is sent and settled. */
    :: passed > safe || (outbox & ~(BIT(safe) - 1)) ->
        begun = passed;
        atomic {
            batch = outbox & ~(BIT(safe) - 1);
            assert(!(batch & BIT(3)) || !(committed & BIT(0)) || ((seen_ever | batch) & BIT(0)));
            seen_ever = seen_ever | batch
        };
        outbox = outbox & ~batch;
        atomic {
            last = TOP(batch);
            seen = MAX(seen, last);
#ifdef LAST_READ
            safe = MAX(safe, last);
#else
            safe = MAX(safe, begun);
#endif
            batch = 0; begun = 0; last = 0
        }
    /* A look: what was seen before the question, the question, and what the answer means. */
    :: safe < seen ->
        mark = seen;
        answer = locks;
        atomic {
            if
            :: !(noted_open & answer) ->
#ifdef NO_SECOND_READ
                safe = MAX(safe, mark);
#endif
                passed = noted; noted = mark; noted_open = answer
            :: else
            fi;
            mark = 0; answer = 0
        }
    od
}

/* At the end everything was found, and the watermark has come to the last position. */
active proctype judge() {
    timeout -> assert(outbox == 0 && seen_ever == committed)
}
