"""The rollout engine, traces on, against a shared plain httpx.AsyncClient driven by hand; prints one JSON line

64 episodes at once, two actions a call, 10 turns with full history; the server answers from a process of its own, but for engine_ceiling, where it shares ours. The loop by hand sends the same conversations and
does nothing else: no world, no trace, no retry. Each round measures every figure once, the two sides in turn; the line holds the medians of the rounds.

http_ceiling: calls a second over loopback HTTP, as a share of what a server with 50 ms latency allows (64 / 50 ms); httpx_ceiling is the loop by hand
engine_ceiling: the same in process, over episodes of 40 turns that nobody dies in, as the default agent plays them (no history); start and end of the run included. engine_ceiling_full: 10 turns with full history
calls_per_s_x_httpx: calls a second at zero latency, as a multiple of the loop by hand
cpu_ms_per_call, cpu_x_40_turns: CPU of the client's process a call in episodes of 10 turns, start and end of the run included; the same in episodes of 40 turns, as a multiple
disk_kb_per_10_turns: a run of episodes of 10 turns, sealed, by the bytes of its files
kb_per_live_episode, growth_mb_5000: memory of 1,000 live episodes, each; memory at the end of 5,000 episodes above that after the first 1,000
faults_survived: see `faults.py`"""
import asyncio, json, subprocess, sys, tempfile, time
from itertools import count, islice
from pathlib import Path
from statistics import median

import httpx, orjson

from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient
from synth_lab.mock import mock, mock_process
from synth_lab.rollout import rollout
from synth_lab.seal import gc, seal
from synth_lab.traces import Store
from synth_lab.view import format, look
from synth_lab.world import ACTIONS, World

AT_ONCE, TURNS, LATENCY, ROUNDS = 64, 10, .05, 5
CEILING = AT_ONCE/LATENCY
OBSERVATION = format(look(World(0), 10_000))

def clocked(make):
    "Run the coroutine that `make()` returns: (its result, seconds of wall, seconds of CPU)"
    wall,cpu = time.perf_counter(),time.process_time()
    found = asyncio.run(make())
    return found, time.perf_counter()-wall, time.process_time()-cpu

async def play(store, client, episodes=AT_ONCE, turns=TURNS, concurrency=AT_ONCE, worlds=range(AT_ONCE), history='full'):
    "A run of `episodes` on `worlds`"
    agent = Agent('mock', history=history)
    return await rollout(store, client, agent, worlds, group_size=episodes//len(worlds), concurrency=concurrency, length=10_000, max_turns=turns)

def engine(turns=TURNS, worlds=range(AT_ONCE), history='full', **where):
    "(calls a second, CPU milliseconds a call) of a run against a server"
    with tempfile.TemporaryDirectory() as folder:
        run,wall,cpu = clocked(lambda: play(Store(folder), AsyncInferenceClient(**where), turns=turns, worlds=worlds, history=history))
        calls = run.episodes.calls.sum() # an episode may die before its last turn
        assert (run.episodes.status == 'done').all()
    return calls/wall, 1e3*cpu/calls

async def by_hand(url, turns):
    "What people write first: one shared client, a gather, the history in a list"
    agent = Agent('mock')
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        async def episode(seed):
            messages = [dict(role='system', content=agent.system)]
            for n in range(turns):
                messages.append(dict(role='user', content=OBSERVATION))
                body = orjson.dumps(dict(model='mock', messages=messages, tools=agent.tools, seed=seed*turns+n))
                reply = await http.post(f'{url}/chat/completions', content=body, headers={'content-type':'application/json'})
                message = orjson.loads(reply.content)['choices'][0]['message']
                messages += [message, *(dict(role='tool', tool_call_id=o['id'], content='Done.') for o in message['tool_calls'])]
        await asyncio.gather(*(episode(s) for s in range(AT_ONCE)))

def hand(url, turns=TURNS): return AT_ONCE*turns/clocked(lambda: by_hand(url, turns))[1]

def disk():
    "Kilobytes a ten turns of a run that is sealed"
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        asyncio.run(play(store, AsyncInferenceClient(app=mock())))
        store.seal()
        store.gc()
        return sum(p.stat().st_size for p in Path(folder).rglob('*') if p.is_file())/AT_ONCE/1024

def resident(): return int(Path('/proc/self/statm').read_text().split()[1])*4/1024 # MB

def live_episodes():
    "Kilobytes of each of 1,000 live episodes with ten turns of history"
    client,seen = AsyncInferenceClient(app=mock()),[]
    def small(n): return play(Store(tempfile.mkdtemp()), client, n, concurrency=n, worlds=range(8))
    asyncio.run(small(8))
    before = resident()
    def look_around(event): seen.append(resident()) if event.turn == TURNS-1 and event.seed == 0 else None
    asyncio.run(rollout(Store(tempfile.mkdtemp()), client, Agent('mock', history='full'), range(8), group_size=125, concurrency=1000, length=10_000, max_turns=TURNS, on_turn=look_around))
    return 1024*(max(seen)-before)/1000

def growth():
    "Megabytes more after 5,000 episodes than after 1,000 of them"
    ends = []
    asyncio.run(rollout(Store(tempfile.mkdtemp()), AsyncInferenceClient(app=mock()), Agent('mock', history='full'), range(50), group_size=100, concurrency=AT_ONCE,
        length=10_000, max_turns=TURNS, on_end=lambda event: ends.append(resident())))
    return max(ends[4500:])-max(ends[500:1000])

PLAYS = ['move_left', 'do']

def survives(seed, turns):
    "Whether the player of `PLAYS` lives that long in a world"
    world = World(seed)
    for name in PLAYS*turns:
        if world.step(ACTIONS.index(name))[2]: return False
    return True

def apart(what):
    "The figure that function `what` measures, in a process of its own"
    return float(subprocess.run([sys.executable, __file__, what], capture_output=True, text=True, check=True).stdout)

def one_round(quick, slow, safe):
    "The figures of one round; `safe` are worlds in which nobody dies"
    hand_fast,(fast,cpu) = hand(quick),engine(base_url=quick)
    long_cpu = engine(4*TURNS, base_url=quick)[1]
    here = mock(latency=LATENCY, plays=PLAYS)
    hand_slow,(http,_),(full,_),(long,_) = hand(slow),engine(base_url=slow),engine(app=here),engine(4*TURNS, safe, 'none', app=here)
    return dict(engine_ceiling=long/CEILING, engine_ceiling_full=full/CEILING, http_ceiling=http/CEILING, httpx_ceiling=hand_slow/CEILING, calls_per_s_x_httpx=fast/hand_fast, calls_per_s=fast,
        cpu_ms_per_call=cpu, cpu_x_40_turns=long_cpu/cpu)

def main():
    safe = list(islice((s for s in count() if survives(s, 4*TURNS)), AT_ONCE)) # worlds are made once a process, these and the first 64
    for seed in range(AT_ONCE): World(seed)
    with mock_process() as quick, mock_process(latency=LATENCY) as slow:
        one_round(quick, slow, safe)
        rounds = [one_round(quick, slow, safe) for _ in range(ROUNDS)]
    found = {k:median(o[k] for o in rounds) for k in rounds[0]}
    found |= dict(disk_kb_per_10_turns=disk(), kb_per_live_episode=apart('live_episodes'), growth_mb_5000=apart('growth'))
    print(json.dumps({k:round(v, 2) for k,v in found.items()}))

if __name__ == '__main__':
    if sys.argv[1:]: print(globals()[sys.argv[1]]())
    else: main()
