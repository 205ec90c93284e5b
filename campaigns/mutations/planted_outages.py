"""Bugs to plant where a crew loses its store, and finds an empty one."""

from __future__ import annotations

from planted import Mutation

MEMORY = ("crew/test_memory.py",)
RETURNS = ("crew/test_store_returns.py",)
COMMAND = ("crew/test_store_command.py",)

OUTAGES = (
    Mutation(
        "outage: a socket of the machine ends the thread that connects to the store",
        "crew/lifeline.py",
        "found.family in _INTERNET and found.getpeername()[1] == port",
        "found.getpeername()[1] == port",
        ("crew/test_rendezvous.py",),
    ),
    Mutation(
        "outage: the first save of an epoch ends members as long as the store is away",
        "peers/ownership.py",
        "    except ProcessGroupError as error:\n        problem = CheckpointError",
        "    except TimeoutError as error:\n        problem = CheckpointError",
        RETURNS,
    ),
    Mutation(
        "outage: the numbers of epochs begin anew",
        "crew/memory.py",
        "        raise_to(store, EPOCHS, self.n_epochs + gap, self.n_epochs + GAP)\n",
        "",
        MEMORY,
    ),
    Mutation(
        "outage: the numbers of workers begin anew",
        "crew/memory.py",
        "        raise_to(store, IDS, self.n_ids + gap, self.n_ids + GAP)\n",
        "",
        MEMORY,
    ),
    Mutation(
        "outage: no epoch has begun in an empty store",
        "crew/memory.py",
        "        raise_begun(store, self.begun)\n",
        "",
        MEMORY,
    ),
    Mutation(
        "outage: numbers grow with each member that restores them",
        "crew/memory.py",
        "        store.plain.compare_set(name, str(found), str(number))\n",
        "        store.add(name, number)\n",
        MEMORY,
    ),
    Mutation(
        "outage: the token is there before the numbers",
        "crew/memory.py",
        "        gap = 0 if found else GAP\n",
        "        gap = 0 if found else GAP\n        store.compare_set(CREW, '', self.crew)\n",
        MEMORY,
    ),
    Mutation(
        "outage: members go on in the store of another crew",
        "crew/memory.py",
        "        if found != self.crew:\n",
        "        if False:\n",
        MEMORY,
    ),
    Mutation(
        "outage: newcomers restore what they have heard of",
        "crew/memory.py",
        "return bool(self.now or (self.crew and not has_begun))",
        "return True",
        MEMORY,
    ),
    Mutation(
        "outage: silence counts while others come back",
        "wire/heartbeats.py",
        "{}, RETURN_S, absence_s\n",
        "{}, 0.0, absence_s\n",
        ("wire/test_heartbeats.py",),
    ),
    Mutation(
        "outage: who finds the next store late is silent",
        "wire/heartbeats.py",
        "silent & self._returned if self._absence_s else silent",
        "silent",
        ("wire/test_heartbeats.py",),
    ),
    Mutation(
        "outage: the roll is called by numbers of a store that is gone",
        "wire/roll_call.py",
        "        self._last = 0\n",
        "        pass\n",
        ("wire/test_roll_call.py",),
    ),
    Mutation(
        "outage: an alarm that nobody could hear is forgotten",
        "wire/watch.py",
        "            self._raise_alarm(self._owed)\n",
        "            pass\n",
        ("wire/test_store.py",),
    ),
    Mutation(
        "outage: nobody looks for alarms once the store was away",
        "wire/watch.py",
        "        return self._may_return\n",
        "        return False\n",
        ("wire/test_store.py",),
    ),
    Mutation(
        "outage: a loss of the store ends training",
        "crew/lookout.py",
        "            self._heard, self._announcements = {}, Announcements()\n            return\n",
        "            self._trouble = self._rendezvous.make_gone_error(RuntimeError('gone'))\n"
        "            return\n",
        RETURNS,
    ),
    Mutation(
        "outage: who needs the store does not wait for it",
        "crew/membership.py",
        "        was_away = self.rendezvous.await_back(error)\n",
        "        was_away = False\n",
        RETURNS,
    ),
    Mutation(
        "outage: survivors do not follow their epoch in the next store",
        "crew/membership.py",
        "                self._previous = before\n",
        "                pass\n",
        ("crew/test_admission.py",),
    ),
    Mutation(
        "outage: a store that stays away is waited for without end",
        "crew/store.py",
        "            if now_s - began_s >= limit_s:\n",
        "            if False:\n",
        RETURNS,
    ),
    Mutation(
        "outage: newcomers that come back to an empty store take it for that of a new run",
        "crew/store.py",
        "        return self.memory.begun\n",
        "        return read_begun(self.store)\n",
        ("crew/test_rendezvous.py",),
    ),
    Mutation(
        "outage: newcomers do not wait for members",
        "crew/membership.py",
        "        rendezvous.await_members()\n        self.id",
        "        self.id",
        RETURNS,
    ),
    Mutation(
        "outage: newcomers that ask already do not wait for members in the next store",
        "crew/membership.py",
        "            if not own.epoch:\n",
        "            if False:\n",
        ("crew/test_admission.py",),
    ),
    Mutation(
        "outage: two workers of one number are let in",
        "crew/admission.py",
        "        if known.setdefault(each.member.id, place) != place:\n",
        "        if False:\n",
        ("crew/test_admission.py",),
    ),
    Mutation(
        "outage: a store that was started again is taken for a first one",
        "crew/command.py",
        "        first_s = first_s or MEMBERS_FIRST_S\n",
        "        pass\n",
        COMMAND,
    ),
    Mutation(
        "outage: newcomers wait for members without end",
        "crew/command.py",
        "                store.delete_key(MEMBERS_FIRST)\n",
        "                pass\n",
        COMMAND,
    ),
)
