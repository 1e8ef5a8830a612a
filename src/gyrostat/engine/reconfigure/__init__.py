"""Changing the workers of a running job: planned changes at a fence, and recovery from a death.

`membership.py` is the state machine: it takes the coordinator's messages and knows the phase of this worker (the table is in
`phases.py`). The script's thread acts on it: `transition.py` switches at the fence, `recovery.py` brings survivors together.
`catch_up.py` sends state to newcomers over the wire of `state_wire.py`; `handover.py` is what they receive at the fence.

A planned change, from the old members 0 (the donor) and 1 to 0, 1 and the newcomer 2. The phases are those of `Membership`:

    coordinator          member 0, 1                                 newcomer 2
        │  Prepare            │ STEADY → CONNECTING                       │ STEADY → CONNECTING
        ├────────────────────►├──────────────────────────────────────────►│
        │                     │ connect, in a thread, while training      │ connect
        │                     │ → PREPARED                                │ → PREPARED
        │◄── prepared ────────┤                                           │
        │                     │ 0: copy of parameters, then every update  │
        │                     ├──────── StateSender ──► StateReceiver ───►│ load, replay
        │◄──────────────────────────────────────────────── prepared ──────┤ caught up
        │  SetFence           │                                           │
        ├────────────────────►│ → FENCE_SET                               │ → FENCE_SET
        │                     │ pass report: acknowledge → ACKNOWLEDGED   │
        │                     │ pass settled: all did → AGREED            │
        │                     │ data positions at the fence ─────────────►│ make batches ahead
        │                     │ boundary of the fence → SWITCHING         │
        │                     │ exchange contexts                         │
        │                     │ 0: rest of the state, checksums ─────────►│ load, compare
        │                     │ move virtual workers → STEADY             │ move → STEADY
        │◄── switched ────────┤◄──────────────────────────────────────────┤ resume the script

    A member that is not in the new generation sends what it must, and leaves: SWITCHING → LEFT.
    If a member to be is gone before all have acknowledged, the coordinator sends Cancel: → STEADY.

A death, of member 2 in a pass:

    coordinator          member 0                                    member 1
        │                     │ exchange fails: PeerLost                  │ still computes
        │◄── lost ────────────┤ waits for survivors                       │
        │  BeginRecovery      │                                           │
        ├────────────────────►│ any phase → RECOVERING                    │ any phase → RECOVERING
        │                     │ connect, in a thread; raise the floor     │ the same; next collective: PeerLost
        │                     │◄──── completed collectives, local ranks ─►│
        │                     │ if one has completed the pass:            │
        │                     │   reports, sums and buffers ─────────────►│ settles the pass, then follows
        │                     │ else: both take over ranks of member 2 from backups, run them, repeat the reduction
        │                     │ → STEADY                                  │ → STEADY
        │◄── recovered ───────┤◄──────────────────────────────────────────┤
"""
