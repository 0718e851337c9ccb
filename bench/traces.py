"""The trace store against SQLite, on 2,000 episodes: 100,000 calls, a million steps, 3 kB of thought a call; prints one JSON line

The other side is what a careful person builds on SQLite: WAL, integer keys, tables clustered by episode, texts in a table of their own, messages stored once, the thought stored
once, ANALYZE, memory-mapped. Both hold the same rows, and each question's answers are compared. Ours is written through `RunWriter`, 50 episodes at a time taking turns, then sealed.

scan_x_sqlite: SQLite's time by ours, geometric mean over QUESTIONS: the scans, aggregates and joins; each the best of 5, the two sides in turn. `questions` has each one
size_x_sqlite: bytes on disk by SQLite's
open_episode_ms: the median episode of 20, opened whole: its calls with all their texts, messages, steps; best of 3
ingest_mb_s: lines written a second by one writer that syncs after every 50 episodes, while its segments are sealed behind it
loop_stall_ms_max: the longest that an event loop waited for its turn while nine segments of 16 MB were sealed one by one, and then merged; `idle_stall_ms`: with nothing going on
seal_mb_s: lines sealed and merged a second, at the end of all writing
filter_to_jsonl_s: 100,000 turns to a fine-tuning file of 0.7 GB, once; with HISTORY=16 it has 1.2 GB
not_scans: the same ratio for what SQLite is better at: a few rows by key, a filter over 2,000 episodes, a search through all text"""
import asyncio, json, math, os, random, re, shutil, sqlite3, tempfile, time
from pathlib import Path
from pydoc_data.topics import topics

from synth_lab import labels, seal # they grow `Store`
from synth_lab.agent import Agent
from synth_lab.filters import Filter
from synth_lab.traces import SEGMENT_BYTES, Store
from synth_lab.world import ACHIEVEMENTS, ACTIONS

EPISODES, TURNS, STEPS, AT_ONCE = int(os.environ.get('EPISODES', 2000)), 50, 10, 50
HISTORY = int(os.environ.get('HISTORY', 1)) # messages after the system prompt; 1: what the agent sees now, as the default agent sends it
MODELS = ['Qwen/Qwen3-4B', 'ft:Qwen/Qwen3-4B:job_1', 'rl:ft:Qwen/Qwen3-4B:job_1:checkpoint-1', 'gpt-4o-mini']
TOOLS = Agent('bench').tools
EFFECTS = ['moved', 'turned, tree in the way', 'nothing to do here', '+1 wood', '+1 drink', 'hit the cow', 'slept', 'not enough wood']

def prose(rng, size=40<<20):
    "Text of about `size` characters: a chain of words over Python's own documentation"
    words = re.findall(r'\S+', ' '.join(topics.values()))
    follow = {}
    for a,b in zip(words, words[1:]): follow.setdefault(a, []).append(b)
    out,word,n = [],words[0],0
    while n < size:
        out.append(word)
        n += len(word)+1
        word = rng.choice(follow.get(word) or words)
    return ' '.join(out)

class Games:
    "Episodes as they are played, one turn after the other"
    def __init__(self):
        self.rng = random.Random(0)
        self.text = prose(self.rng)

    def think(self):
        "A thought of 2 to 4 kB"
        return ' '.join(self.text[(i := self.rng.randrange(len(self.text)-900)):i+self.rng.randrange(300, 900)] for _ in range(5))

    def turn(self, e, n):
        "The fields of call `n` of episode `e`, with its steps"
        rng,thought = self.rng,self.think()
        steps = []
        for k in range(STEPS):
            unlocked = [a for a in ACHIEVEMENTS if a not in e['found']][:1] if rng.random() < .012 else []
            e['found'] |= {a:n*STEPS-STEPS+k+1 for a in unlocked}
            e['health'] = max(1, min(9, e['health'] + rng.choice([-1, 0, 0, 0, 0, 0, 0, 1])))
            steps.append(dict(step=n*STEPS-STEPS+k+1, action=rng.choice(ACTIONS), effect=rng.choice(EFFECTS), reward=float(len(unlocked)), unlocked=unlocked,
                health=e['health'], terminated=False, truncated=False))
        actions = [s['action'] for s in steps]
        arguments,verdict = json.dumps(dict(actions=actions)),rng.choices(['ok', 'malformed'], [50, 1])[0]
        call = [dict(id=f'call_{n}', type='function', function=dict(name='interact_many', arguments=arguments))]
        usage = dict(input_tokens=700+400*min(n, 8), output_tokens=len(thought)//4)
        raw = dict(id=f'chatcmpl-{rng.getrandbits(96):024x}', object='chat.completion', model=e['model'], usage=usage,
            choices=[dict(index=0, finish_reason='tool_calls', message=dict(role='assistant', content=None, reasoning_content=thought, tool_calls=call))])
        seen = f'Crafter, step {n*STEPS-STEPS} of 500\nhealth {e["health"]}, food 7, drink 5, energy 8\nview:\n' + '\n'.join(
            ' '.join(rng.choices('.....TTw~', k=9)) for _ in range(7)) + '\nlast actions: ' + '; '.join(f'{s["action"]} -> {s["effect"]}' for s in steps)
        e['history'] += [dict(role='user', content=seen)]
        said = dict(turn=n, call_id=f'call_{rng.getrandbits(72):018x}', model=e['model'], response_model=e['model'], started_at=f'2026-01-31T12:{n:02d}:{n%60:02d}.{e["seed"]%1000:03d}Z',
            latency_ms=round(rng.expovariate(1/900), 1), tries=[dict(http_status=200, latency_ms=1.)], http_status=200, verdict=verdict, finish_reason='tool_calls', thought=thought,
            tool_name='interact_many', arguments=arguments, actions=actions, turn_reward=sum(len(s['unlocked']) for s in steps), cost_usd=usage['output_tokens']*6e-7,
            seed=rng.getrandbits(30), temperature=1., raw=raw, steps=steps, **usage)
        prompt,output = e['history'][:1]+e['history'][1:][-HISTORY:],dict(role='assistant', content=None, tool_calls=call)
        e['history'] += [output, dict(role='tool', tool_call_id=call[0]['id'], content='; '.join(o['effect'] for o in steps))]
        return prompt,output,said

    def group(self, run, first):
        "Episodes that begin together"
        system = dict(role='system', content='Play Crafter. '*200)
        return [dict(episode_id=f'{run}:{i}:0', seed=i, model=MODELS[int(run[-1])], found={}, health=9, history=[system])
            for i in range(first, first+AT_ONCE)]

# Ours

class Ours:
    def __init__(self, folder): self.store,self.seconds,self.bytes = Store(folder),0.,0

    def run(self, run, seeds, resume=False):
        config = dict(model=MODELS[int(run[-1])], endpoint='bench', split='train', difficulty='normal', rng='pure', length=500)
        self.writer = self.store.run(run, config, [dict(episode_id=f'{run}:{i}:0', seed=i, sample=0) for i in seeds], resume)

    def begin(self, e): self.writer.write('episode', episode_id=e['episode_id'], attempt=1, started_at='2026-01-31T12:00:00.000Z')
    def call(self, e, prompt, output, said): self.writer.call(prompt, TOOLS, output, episode_id=e['episode_id'], attempt=1, **said)
    def end(self, e): self.writer.write('episode_end', episode_id=e['episode_id'], attempt=1, status='done', ended_by='max_turns', turns=TURNS, steps_played=TURNS*STEPS, calls=TURNS,
        achievements=list(e['found']), unlock_steps=list(e['found'].values()), ended_at='2026-01-31T12:50:00.000Z', wall_s=1., cost_usd=.04, **{'return':float(len(e['found']))})
    def sync(self): self.writer.sync()
    def close(self):
        self.writer.close()
        self.bytes += self.writer._written

    def ask(self, q): return [tuple(o.values()) for o in self.store.rows(q)]
    def size(self): return sum(p.stat().st_size for p in self.store.path.rglob('*') if p.is_file())

# SQLite

TABLES = """
CREATE TABLE episodes (id INTEGER PRIMARY KEY, episode_id TEXT, run_id TEXT, model TEXT, seed INT, sample INT, status TEXT, ended_by TEXT, turns INT, steps INT, calls INT, "return" REAL,
    n_achievements INT, cost_usd REAL, started_at TEXT, ended_at TEXT, wall_s REAL);
CREATE TABLE unlocked (episode INT, step INT, achievement TEXT, PRIMARY KEY (episode, step, achievement)) WITHOUT ROWID;
CREATE TABLE calls (episode INT, turn INT, call_id TEXT, model TEXT, started_at TEXT, latency_ms REAL, tries INT, http_status INT, verdict TEXT, finish_reason TEXT, tool_name TEXT,
    actions TEXT, turn_reward INT, input_tokens INT, output_tokens INT, cost_usd REAL, seed INT, temperature REAL, output_id INT, PRIMARY KEY (episode, turn)) WITHOUT ROWID;
CREATE TABLE texts (episode INT, turn INT, thought TEXT, arguments TEXT, raw TEXT, PRIMARY KEY (episode, turn));
CREATE TABLE prompts (episode INT, turn INT, n INT, message INT, PRIMARY KEY (episode, turn, n)) WITHOUT ROWID;
CREATE TABLE messages (id INTEGER PRIMARY KEY, role TEXT, body TEXT);
CREATE TABLE steps (episode INT, step INT, turn INT, "action" TEXT, effect TEXT, reward REAL, unlocked TEXT, health INT, terminated INT, truncated INT, PRIMARY KEY (episode, step)) WITHOUT ROWID;
"""

class Sqlite:
    def __init__(self, file):
        self.file,self.db,self.seconds,self.ids,self.known = file,sqlite3.connect(file),0.,{},{}
        self.db.executescript(f'PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA mmap_size = 8000000000; PRAGMA cache_size = -500000; {TABLES}')

    def run(self, run, seeds): self.run_id = run
    def begin(self, e): self.ids[e['episode_id']] = len(self.ids)+1

    def message(self, m):
        if id(m) not in self.known:
            self.known[id(m)] = m,self.db.execute('INSERT INTO messages (role, body) VALUES (?, ?)', (m['role'], json.dumps(m, ensure_ascii=False))).lastrowid
        return self.known[id(m)][1]

    def call(self, e, prompt, output, said):
        i,n,s = self.ids[e['episode_id']],said['turn'],said
        cut = json.dumps(s['raw']|dict(choices=[]))+json.dumps(s['raw']['choices'][0]['message']['tool_calls'])
        self.db.execute(f'INSERT INTO calls VALUES ({", ".join("?"*19)})', (i, n, s['call_id'], s['model'], s['started_at'], s['latency_ms'], 1, 200, s['verdict'], s['finish_reason'],
            s['tool_name'], json.dumps(s['actions']), s['turn_reward'], s['input_tokens'], s['output_tokens'], s['cost_usd'], s['seed'], 1., self.message(output)))
        self.db.execute('INSERT INTO texts VALUES (?, ?, ?, ?, ?)', (i, n, s['thought'], s['arguments'], cut))
        self.db.executemany('INSERT INTO prompts VALUES (?, ?, ?, ?)', [(i, n, k, self.message(m)) for k,m in enumerate(prompt)])
        self.db.executemany('INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)', [(i, o['step'], n, o['action'], o['effect'], o['reward'],
            ','.join(o['unlocked']) or None, o['health'], o['terminated'], o['truncated']) for o in s['steps']])

    def end(self, e):
        i = self.ids[e['episode_id']]
        self.db.executemany('INSERT INTO unlocked VALUES (?, ?, ?)', [(i, s, a) for a,s in e['found'].items()])
        self.db.execute(f'INSERT INTO episodes VALUES ({", ".join("?"*17)})', (i, e['episode_id'], self.run_id, e['model'], e['seed'], 0, 'done', 'max_turns', TURNS, TURNS*STEPS, TURNS,
            float(len(e['found'])), len(e['found']), .04, '2026-01-31T12:00:00.000Z', '2026-01-31T12:50:00.000Z', 1.))
    def sync(self):
        self.db.commit()
        self.known.clear()
    def close(self): self.db.executescript('ANALYZE; PRAGMA wal_checkpoint(TRUNCATE)')
    def ask(self, q): return self.db.execute(q).fetchall()
    def size(self): return os.path.getsize(self.file)

# Question → (ours, SQLite's)
QUESTIONS = {
    'success rate of each achievement': ("""SELECT model, a, count(*)/(SELECT count(*) FROM episodes e WHERE e.model = f.model AND status = 'done')::DOUBLE FROM (SELECT model, unnest(achievements) AS a
            FROM episodes WHERE status = 'done') f GROUP BY model, a ORDER BY 1, 2""",
        """SELECT model, achievement, count(*)*1.0/(SELECT count(*) FROM episodes f WHERE f.model = e.model AND status = 'done') FROM episodes e JOIN unlocked u ON u.episode = e.id
            WHERE status = 'done' GROUP BY 1, 2 ORDER BY 1, 2"""),
    'deciles of the return': ("""SELECT model, quantile_disc("return", .1), quantile_disc("return", .5), quantile_disc("return", .9) FROM episodes GROUP BY 1 ORDER BY 1""",
        """SELECT model, max(r) FILTER (WHERE n = (c+9)/10), max(r) FILTER (WHERE n = (c+1)/2), max(r) FILTER (WHERE n = (9*c+9)/10) FROM (SELECT model, "return" AS r, row_number() OVER (PARTITION BY model
            ORDER BY "return") AS n, count(*) OVER (PARTITION BY model) AS c FROM episodes) GROUP BY 1 ORDER BY 1"""),
    'tokens and cost of each model': ('SELECT model, sum(input_tokens), sum(output_tokens), sum(cost_usd), avg(latency_ms) FROM calls GROUP BY 1 ORDER BY 1',)*2,
    'tools and verdicts': ('SELECT tool_name, verdict, count(*) FROM calls GROUP BY 1, 2 ORDER BY 1, 2',)*2,
    'actions asked for': ('SELECT a, count(*) FROM (SELECT unnest(actions) AS a FROM calls) GROUP BY 1 ORDER BY 1',
        'SELECT value, count(*) FROM calls, json_each(actions) GROUP BY 1 ORDER BY 1'),
    'steps to the first achievement': ('SELECT model, avg(unlock_steps[1]) FROM episodes GROUP BY 1 ORDER BY 1',
        'SELECT model, avg(s) FROM (SELECT episode, min(step) AS s FROM unlocked GROUP BY 1) JOIN episodes ON id = episode GROUP BY 1 ORDER BY 1'),
    'first reward, from the steps': ('SELECT avg(s) FROM (SELECT episode_id, min(step) AS s FROM steps WHERE reward > 0 GROUP BY 1)',
        'SELECT avg(s) FROM (SELECT episode, min(step) AS s FROM steps WHERE reward > 0 GROUP BY 1)'),
    'rewards of each effect': ('SELECT "action", effect, count(*), sum(reward) FROM steps GROUP BY 1, 2 ORDER BY 1, 2',)*2,
    'calls joined with their steps': ("""SELECT c.verdict, s."action", count(*), sum(s.reward), avg(c.latency_ms) FROM calls c JOIN steps s USING (episode_id, turn) GROUP BY 1, 2 ORDER BY 1, 2""",
        'SELECT c.verdict, s."action", count(*), sum(s.reward), avg(c.latency_ms) FROM calls c JOIN steps s USING (episode, turn) GROUP BY 1, 2 ORDER BY 1, 2'),
    'the best twenty with their cost': ("""SELECT e.episode_id, e."return", sum(c.cost_usd), count(*) FROM episodes e JOIN calls c USING (episode_id) GROUP BY 1, 2 ORDER BY 2 DESC, 1 LIMIT 20""",
        """SELECT e.episode_id, e."return", sum(c.cost_usd), count(*) FROM episodes e JOIN calls c ON c.episode = e.id GROUP BY e.id ORDER BY 2 DESC, 1 LIMIT 20"""),
    'mean return so far, by step': ('SELECT step, avg(r) FROM (SELECT step, sum(reward) OVER (PARTITION BY episode_id ORDER BY step) AS r FROM steps) GROUP BY 1 ORDER BY 1',
        'SELECT step, avg(r) FROM (SELECT step, sum(reward) OVER (PARTITION BY episode ORDER BY step) AS r FROM steps) GROUP BY 1 ORDER BY 1')}
NOT_SCANS = {
    'moving mean over 20 episodes': ("""SELECT model, seed, avg("return") OVER (PARTITION BY model ORDER BY seed ROWS 19 PRECEDING) FROM episodes ORDER BY 1, 2""",)*2,
    'episodes with three achievements': ("""SELECT count(*) FROM episodes WHERE "return" >= 3 AND list_has_all(achievements, ['collect_drink', 'collect_sapling'])""",
        """SELECT count(*) FROM episodes e WHERE "return" >= 3 AND 2 = (SELECT count(*) FROM unlocked u WHERE u.episode = e.id AND achievement IN ('collect_drink', 'collect_sapling'))"""),
    'a word in all thoughts': ("SELECT count(*) FROM calls WHERE thought LIKE '%zebra crossing%'", "SELECT count(*) FROM texts WHERE thought LIKE '%zebra crossing%'"),
    'the thoughts of one episode': ("SELECT turn, thought FROM calls WHERE episode_id = 'r1:77:0' ORDER BY 1", """SELECT turn, thought FROM texts
        WHERE episode = (SELECT id FROM episodes WHERE episode_id = 'r1:77:0') ORDER BY 1""")}

def fill(games, *sides):
    "Play every episode on all sides"
    runs = [f'r{k}' for k in range(len(MODELS))]
    for run in runs:
        for side in sides: side.run(run, range(EPISODES//len(runs)))
        for first in range(0, EPISODES//len(runs), AT_ONCE):
            group = games.group(run, first)
            turns = [(e, *games.turn(e, n)) for n in range(1, TURNS+1) for e in group]
            for side in sides:
                began = time.perf_counter()
                for e in group: side.begin(e)
                for t in turns: side.call(*t)
                for e in group: side.end(e)
                side.sync()
                side.seconds += time.perf_counter()-began
        for side in sides: side.close()

def same(a, b):
    "Whether two answers are equal, up to rounding"
    return len(a) == len(b) and all(x == y or math.isclose(x, y, rel_tol=1e-9) for r,s in zip(a, b) for x,y in zip(r, s))

def ratios(ours, sqlite, questions, rounds=5):
    "Question → SQLite's seconds by ours; raises when the answers differ"
    found = {}
    for name,both in questions.items():
        best = [math.inf]*2
        for _ in range(rounds):
            answers = []
            for k,(side,q) in enumerate(zip((ours, sqlite), both)):
                began = time.perf_counter()
                answers.append(side.ask(q))
                best[k] = min(best[k], time.perf_counter()-began)
            assert same(*answers), name
        found[name] = best
    return found

def clock(f, tries=3):
    "The least milliseconds that `f()` took"
    found = []
    for _ in range(tries):
        began = time.perf_counter()
        f()
        found.append(time.perf_counter()-began)
    return 1e3*min(found)

async def stall(work):
    "The longest that the event loop waited for its turn while `work()` went on in a thread, in milliseconds"
    worst,job = 0.,asyncio.get_running_loop().run_in_executor(None, work)
    while not job.done():
        began = time.perf_counter()
        await asyncio.sleep(.001)
        worst = max(worst, time.perf_counter()-began-.001)
    await job
    return 1e3*worst

def loop_stall(games, folder, segments=9):
    "(Worst stall while full segments are sealed the way a writer has it done, and at last merged; the same while nothing goes on)"
    found = []
    for k in range(segments):
        ours = Ours(folder/'stall')
        ours.run('r0', range(AT_ONCE), resume=True)
        e = games.group('r0', 0)[0]
        while not ours.writer._segments or ours.writer._segments[0].size < SEGMENT_BYTES: ours.call(e, *games.turn(e, 1))
        ours.close()
        segment = max(ours.store.path.glob('runs/r0/live/*.jsonl'), key=lambda p: p.stat().st_mtime_ns)
        found.append(asyncio.run(stall(lambda: seal._SEALER.submit(seal._try_seal, segment).result())))
    assert any(p.name.startswith('merged') for p in ours.store.path.glob('runs/r0/manifest/*'))
    return max(found),asyncio.run(stall(lambda: time.sleep(5)))

def main(folder):
    games,ours,sqlite = Games(),Ours(folder/'lab'),Sqlite(folder/'traces.db')
    fill(games, ours, sqlite)
    began = time.perf_counter()
    seal._SEALER.submit(int).result()
    ours.store.seal(), ours.store.gc()
    behind = time.perf_counter()-began
    found,others = (ratios(ours, sqlite, q) for q in (QUESTIONS, NOT_SCANS))
    x = lambda f: math.exp(sum(math.log(b/a) for a,b in f.values())/len(f))
    ids = [o[0] for o in ours.ask("SELECT episode_id FROM episodes ORDER BY md5(episode_id) LIMIT 20")]
    opened = sorted(clock(lambda: ours.store.episode(o)) for o in ids)
    worst,idle = loop_stall(games, folder)
    line = dict(scan_x_sqlite=x(found), size_x_sqlite=ours.size()/sqlite.size(), open_episode_ms=opened[len(opened)//2], ingest_mb_s=ours.bytes/ours.seconds/1e6,
        loop_stall_ms_max=worst, idle_stall_ms=idle, steps=ours.ask('SELECT count(*) FROM steps')[0][0], mb=ours.size()/1e6, seal_mb_s=ours.bytes/behind/1e6, ingest_x_sqlite=sqlite.seconds/ours.seconds)
    line['filter_to_jsonl_s'] = clock(lambda: Filter().select(ours.store).write(folder/'sft.jsonl'), 1)/1e3
    told = lambda f: {k:[round(1e3*a, 1), round(1e3*b, 1)] for k,(a,b) in f.items()}
    print(json.dumps({k:round(v, 2) for k,v in line.items()} | dict(questions=told(found), not_scans=told(others))))

if __name__ == '__main__':
    folder = Path(os.environ.get('KEEP') or tempfile.mkdtemp())
    try: main(folder)
    finally: os.environ.get('KEEP') or shutil.rmtree(folder)
