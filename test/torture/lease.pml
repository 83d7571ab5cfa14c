/*
 * lease.pml
 *	  A model of the lease protocol, for spin: claim, wait, write under the fence, complete,
 *	  release, lapse, take over, heal, clean, and a crash of any client.  lease.pl runs it.
 *
 * One request, and CLIENTS clients.  A client claims until it has an answer.  The clock lets a
 * live lease lapse at any moment.  A client can crash at any step, CRASHES of them: its
 * transaction is then rolled back, and its locks are given up.
 *
 * What the server guarantees is taken as given: a transaction's writes appear at once, at its
 * commit; it holds the lock of a row that it has inserted, changed or deleted until it ends.
 * What the extension adds is the model: the order of lock, look, draw and write; the second look
 * after a wait; the token and the fence; the wake-up after the commit.
 *
 * Broken variants, by -D.  lease.pl asserts that spin finds what each of them breaks.
 *
 *	NO_FENCE	a holder writes without idem_fence
 *	NO_RECHECK	a waiter does not look again after waking: it believes that the lease lapsed
 *	EARLY_TOKEN	a claim draws its token before it locks the key
 *	CLEAN_LIVE	the cleaner removes the row of a live lease
 *	EARLY_WAKE	the holder wakes the waiters before its transaction writes the row, and a waiter
 *				looks only when it is woken
 *	LATE_SLEEP	a waiter looks, and announces only then that it sleeps
 *	NO_BOUND	a waiter looks only when it is woken: nobody wakes it when a lease lapses
 *	HEAL_TAKES	idem_heal removes the holder's token
 *
 * Not in the model: claims without a lease, savepoints, two requests, the loss of a commit
 * (the extension forces synchronous commits for leases).
 */

#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#define NOBODY 255

mtype = { ABSENT, IN_PROGRESS, COMPLETED };

/* The row, as committed */
mtype row = ABSENT;
byte row_token = 0;
bool live = false;			/* the clock has not reached lease_until */

byte row_lock = NOBODY;		/* the transaction that writes the row, or has it locked */
byte key_lock = NOBODY;		/* of a leased claim, from the look to the write */
byte next_token = 1;		/* the sequence */

/* Waiters on the condition variable of the key */
bool sleeping[CLIENTS];
bool woken[CLIENTS];

byte crashes = 0;
byte ended = 0;				/* clients that have an answer, or are gone */

/* Only for the assertions */
byte last_claimed = 0;		/* token of the latest claim that committed */
byte last_write = 0;		/* token of the latest write that committed */
byte settled_token = 0;		/* under which the request was completed */
bool healed = false;
bool promised = false;		/* the latest lease has neither ended nor been given up */

#ifdef NO_RECHECK
#define CAN_STILL_CLAIM	true
#else
#define CAN_STILL_CLAIM	(row == saw && (saw == ABSENT || !live))
#endif
#ifdef CLEAN_LIVE
#define CAN_CLEAN		true
#else
#define CAN_CLEAN		(!live)
#endif

inline wake_all()
{
	d_step {
		woken[0] = sleeping[0];
		woken[1] = sleeping[1];
#if CLIENTS > 2
		woken[2] = sleeping[2];
#endif
	}
}

inline may_crash()
{
	if
	:: atomic { crashes < CRASHES -> crashes++;
		if
		:: row_lock == _pid -> row_lock = NOBODY
		:: else
		fi;
		if
		:: key_lock == _pid -> key_lock = NOBODY
		:: else
		fi;
		goto gone }
	:: skip
	fi
}

proctype Client(byte me)
{
	byte token = 0;
	mtype saw;
	bool saw_live;

claim:
#ifdef EARLY_TOKEN
	atomic { next_token < 20 -> token = next_token; next_token++ };
#endif
	atomic { key_lock == NOBODY -> key_lock = _pid };

	/* The look.  A transaction that writes the row is waited for, without the key's lock. */
	if
	:: atomic { row_lock != NOBODY -> key_lock = NOBODY };
		row_lock == NOBODY;
		goto claim
	:: atomic { row_lock == NOBODY -> saw = row; saw_live = live }
	fi;
	if
	:: saw == COMPLETED -> key_lock = NOBODY; goto answer
	:: saw == IN_PROGRESS && saw_live -> key_lock = NOBODY; goto wait
	:: else
	fi;
	may_crash();

write:
	skip;
#ifndef EARLY_TOKEN
	d_step { token = next_token; next_token++ };
#endif
	/* Insert, or claim in place: refused if the row was changed since the look. */
	if
	:: atomic { row_lock == NOBODY && CAN_STILL_CLAIM -> row_lock = _pid; key_lock = NOBODY }
	:: atomic { else -> key_lock = NOBODY }; goto claim
	fi;
	may_crash();
	d_step {
		/* Its commit */
		assert(token > last_claimed);
		assert(settled_token == 0);
		assert(!promised);
		row = IN_PROGRESS;
		row_token = token;
		live = true;
		promised = true;
		last_claimed = token;
		row_lock = NOBODY
	};
	goto work;

wait:
#ifdef LATE_SLEEP
	atomic { sleeping[me] = true; woken[me] = false };
#else
	/* First announce the sleep, then look: a wake-up between the two is not lost. */
	atomic { sleeping[me] = true; woken[me] = false };
	if
	:: row != IN_PROGRESS || !live -> goto awake
	:: else
	fi;
#endif
	if
	:: woken[me]
#if !defined(EARLY_WAKE) && !defined(LATE_SLEEP) && !defined(NO_BOUND)
	/* The bounded wait: it looks again when the lease ends, and each second. */
	:: row != IN_PROGRESS || !live
#endif
	:: atomic { crashes < CRASHES -> crashes++; goto gone }
	fi;
awake:
	atomic { sleeping[me] = false; woken[me] = false };
#ifdef NO_RECHECK
	saw = IN_PROGRESS;
	atomic { key_lock == NOBODY -> key_lock = _pid };
	goto write;
#else
	goto claim;
#endif

work:
	may_crash();
	/* A transaction of the holder */
#ifndef NO_FENCE
	if
	:: atomic { row_lock == NOBODY && row == IN_PROGRESS && row_token == token -> row_lock = _pid }
	:: row_lock == NOBODY && !(row == IN_PROGRESS && row_token == token) -> goto lost
	fi;
	may_crash();
#endif
	d_step {
		/* Its commit */
		assert(token >= last_write);
		last_write = token;
		if
		:: row_lock == _pid -> row_lock = NOBODY
		:: else
		fi
	};
	/* It settles the request, gives it up, or pauses for ever. */
	if
	:: goto settle
	:: goto release
	:: goto gone
	fi;

settle:
	may_crash();
#ifdef EARLY_WAKE
	wake_all();
#endif
	if
	:: atomic { row_lock == NOBODY && row_token == token && row == IN_PROGRESS -> row_lock = _pid }
	/* Somebody healed it: idem_complete returns false. */
	:: row_lock == NOBODY && row_token == token && row == COMPLETED -> assert(healed); goto answer
	:: row_lock == NOBODY && row_token != token -> goto lost
	fi;
	may_crash();
	d_step {
		assert(settled_token == 0);
		row = COMPLETED;
		settled_token = token;
		live = false;
		promised = false;
		row_lock = NOBODY
	};
#ifndef EARLY_WAKE
	wake_all();
#endif
	goto answer;

release:
	may_crash();
	if
	:: atomic { row_lock == NOBODY && row_token == token && row == IN_PROGRESS -> row_lock = _pid }
	:: row_lock == NOBODY && !(row_token == token && row == IN_PROGRESS) -> goto lost
	fi;
	d_step {
		row = ABSENT;
		row_token = 0;
		live = false;
		promised = false;
		row_lock = NOBODY
	};
	wake_all();
	goto gone;

lost:
	/* ID410.  The holder of a lease that somebody healed is not told so by idem_complete. */
	assert(row_token == token || settled_token != token);
	goto gone;

answer:
	assert(row == COMPLETED);
gone:
	ended++
}

proctype Clock()
{
end:
	do
	:: atomic { live -> live = false; promised = false }
	od
}

/* Removes an expired row.  In the model the row of a lapsed lease can expire at once. */
proctype Cleaner()
{
end:
	if
	:: atomic { row == IN_PROGRESS && row_lock == NOBODY && CAN_CLEAN -> row_lock = _pid };
		d_step { row = ABSENT; row_token = 0; live = false; row_lock = NOBODY };
	:: ended == CLIENTS
	fi
}

/* Finds the work done, and says so for the holder. */
proctype Healer()
{
end:
	if
	:: atomic { row == IN_PROGRESS && row_lock == NOBODY && last_write == row_token -> row_lock = _pid };
		d_step {
			assert(settled_token == 0);
			row = COMPLETED;
			settled_token = row_token;
#ifdef HEAL_TAKES
			row_token = 0;
#endif
			healed = true;
			live = false;
			promised = false;
			row_lock = NOBODY
		};
		wake_all()
	:: ended == CLIENTS
	fi
}

init
{
	atomic {
		run Client(0);
		run Client(1);
#if CLIENTS > 2
		run Client(2);
#endif
		run Clock();
		run Cleaner();
		run Healer()
	}
}

/* Each client gets an answer, where every process that can go on does. */
ltl answers { <> (ended == CLIENTS) }
