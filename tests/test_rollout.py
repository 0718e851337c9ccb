"What the notebook on rollouts should not carry: dying servers, killed processes, records that do not fit"
import asyncio, gc, os, pickle, random, re, shutil, signal, subprocess, sys, time
from dataclasses import asdict, replace
from importlib.metadata import version
from types import SimpleNamespace

import orjson, psutil, pytest

from synth_lab.agent import Agent
from synth_lab.client import (AsyncInferenceClient, AuthError, BadRequest, ClientError, ContextLength, EndpointDown, EndpointSlow, ModelNotFoundError,
    PermissionDenied, QuotaSpent, ServerError)
from synth_lab.core import LabError
from synth_lab.episode import RolloutError, call_seed
from synth_lab.imports import import_rollout
from synth_lab.metrics import mean_ci, summary
from synth_lab.mock import mock
from synth_lab.replays import film, fork, rerun, seen
from synth_lab.rollout import rollout, rollout_sync, stream
from synth_lab.serve import serving
from synth_lab.traces import Store, StoreError
from synth_lab.view import Memory, look, observe, parse
from synth_lab.world import ACTIONS, DIFFICULTIES, World, WorldError, column_row

HARD = DIFFICULTIES['hard']

class Dice:
    "A client whose model throws dice with the seed that it is sent; `before(n, payload)` runs ahead of call n and may fail, wait or reply"
    endpoint = SimpleNamespace(name='dice', in_process=True)
    def __init__(self, before=None): self.before,self.sent,self.now,self.most = before,[],0,0
    def cost(self, model, usage): return .001

    async def post(self, payload):
        self.sent.append(payload)
        self.now,self.most = self.now+1,max(self.most, self.now+1)
        try:
            said = self.before(len(self.sent), payload) if self.before else None
            if asyncio.iscoroutine(said): said = await said
        finally: self.now -= 1
        tried = dict(started_at='2026-01-31T12:00:00.000Z', latency_ms=1., http_status=200, error=None)
        return said or reply(random.Random(payload['seed']).choices(ACTIONS, k=5)), [tried]

def reply(actions, name='interact_many'):
    call = dict(id='call_0', function=dict(name=name, arguments=orjson.dumps(dict(actions=actions)).decode()))
    choice = dict(finish_reason='tool_calls', message=dict(role='assistant', content='I throw dice.', tool_calls=[call]))
    return dict(model='dice-1', usage=dict(prompt_tokens=300, completion_tokens=5), choices=[choice])

def play(store, client, seeds=range(4), agent=Agent('dice'), run_id='r', max_turns=6, **kw):
    return asyncio.run(rollout(store, client, agent, seeds, run_id=run_id, max_turns=max_turns, **kw))

@pytest.fixture
def store(tmp_path): return Store(tmp_path/'lab')

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The same eight episodes without any trouble"
    return play(Store(tmp_path_factory.mktemp('whole')/'lab'), Dice(), range(8)).episodes

def same(episodes, whole, played=()):
    "Whether two tables tell of the same games; `played` are further columns to compare"
    columns = ['seed', 'status', 'ended_by', 'turns', 'steps', 'return', 'n_achievements', 'unlock_steps', 'final_hash', *played]
    return episodes[columns].astype(str).values.tolist() == whole[columns].astype(str).values.tolist()

def once(store, run_id='r'):
    "Every turn and every step is there once, none is missing"
    rows = store.rows('''SELECT e.turns, e.steps, (SELECT list(turn ORDER BY turn) FROM calls c WHERE c.episode_id = e.episode_id AND verdict IS NOT NULL) AS t,
        (SELECT list(step ORDER BY step) FROM steps s WHERE s.episode_id = e.episode_id) AS s FROM episodes e WHERE run_id = ?''', run_id)
    return all((o['t'] or []) == [*range(1, o['turns']+1)] and (o['s'] or []) == [*range(1, o['steps']+1)] for o in rows)

# What a run leaves behind

def test_episodes_calls_steps_and_messages_agree(store, whole):
    e = play(store, Dice(), range(8), split='train').episodes
    assert same(e, whole, ['calls', 'input_tokens', 'cost_usd']) and once(store) and set(e.split) == {'train'} and set(e.status) == {'done'}
    c = store.sql('SELECT * FROM calls')
    assert len(c) == e.calls.sum() and c.turn_reward.sum() == e.n_achievements.sum() and set(c.verdict) == {'ok'} and set(c.response_model) == {'dice-1'}
    totals = store.rows("""SELECT episode_id, round(sum(reward), 6) AS "return", flatten(list(unlocked ORDER BY step)) AS achievements
        FROM steps GROUP BY episode_id ORDER BY episode_id""")
    assert totals == store.rows('SELECT episode_id, "return", achievements FROM episodes ORDER BY episode_id')
    assert lost(store) == 0 and set(c.attempts) == {1}

def lost(store):
    "How many calls name a message that is not there"
    return store.rows('SELECT count(*) AS n FROM calls c WHERE NOT list_has_all((SELECT list(msg_id) FROM messages), c.prompt_ids)')[0]['n']

def test_the_prompt_on_disk_is_the_prompt_that_was_sent(store):
    dice = Dice()
    play(store, dice, [3], Agent('dice', history=2))
    bodies = {o['msg_id']:orjson.loads(o['body']) for o in store.rows('SELECT * FROM messages')}
    told = [[bodies[i] for i in o['prompt_ids']] for o in store.rows('SELECT prompt_ids FROM calls ORDER BY turn')]
    assert told == [o['messages'] for o in dice.sent] and len(told[-1]) == 1+2*3+1

def test_a_run_whose_folder_is_gone_does_not_look_empty(store):
    seen,unseen = play(store, Dice(), run_id='seen'),play(store, Dice(), run_id='unseen')
    assert len(seen.episodes) == 4 and repr(unseen) == "Run('unseen', 'dice')"
    shutil.rmtree(store.path)
    assert len(seen.episodes) == 4
    with pytest.raises(RolloutError, match='run `unseen` is not in'): unseen.episodes

def test_an_episode_replays_from_its_steps(store):
    e, = play(store, Dice(), [5]).episodes.to_dict('records')
    world = World(5, length=200)
    for o in store.rows('SELECT "action" FROM steps ORDER BY step'): world.step(ACTIONS.index(o['action']))
    assert world.state_hash() == e['final_hash']

def test_groups_share_a_world_and_differ_in_sampling(store):
    run = play(store, Dice(), [1, 2], group_size=3)
    assert run.episodes[['seed', 'sample']].values.tolist() == [[s, i] for s in (1, 2) for i in range(3)]
    first = store.sql('SELECT e.seed, prompt_ids[2] AS seen, c.seed AS sampling FROM calls c JOIN episodes e USING (episode_id) WHERE turn = 1')
    assert first.groupby('seed').seen.nunique().tolist() == [1, 1] and first.sampling.nunique() == 6
    assert run.episodes.final_hash.nunique() > 2

def test_call_seeds_differ_and_fit_31_bits():
    seeds = {call_seed(r, dict(seed=s, sample=i), t) for r in range(3) for s in range(9) for i in range(3) for t in range(9)}
    assert len(seeds) == 3*9*3*9 and max(seeds) < 2**31 and min(seeds) >= 0

def test_no_more_episodes_at_once_than_asked(store):
    dice = Dice(lambda n, p: asyncio.sleep(.001))
    play(store, dice, range(8), concurrency=3)
    assert dice.most == 3

def test_a_model_that_never_waits_keeps_nobody_waiting(store):
    beats = []
    async def beating():
        while True:
            beats.append(1)
            await asyncio.sleep(0)
    async def both():
        clock = asyncio.create_task(beating())
        await rollout(store, Dice(), Agent('dice'), [0], run_id='r', max_turns=30, length=10_000)
        clock.cancel()
    asyncio.run(both())
    assert len(beats) >= 30

def test_episodes_of_a_model_that_never_waits_take_turns(store):
    heard = []
    play(store, Dice(), on_turn=heard.append)
    assert [o.seed for o in heard] == [0, 1, 2, 3]*6

def test_a_slow_world_holds_up_nobody_for_longer_than_a_step_of_it(store, monkeypatch):
    "Two turns of the slow one never follow each other"
    step,heard = World.step,[]
    def slow(self, action):
        if self.seed == 0: time.sleep(.002)
        return step(self, action)
    monkeypatch.setattr(World, 'step', slow)
    e = play(store, Dice(lambda n, p: asyncio.sleep(.001)), on_turn=heard.append).episodes
    seeds = [o.seed for o in heard]
    assert e.status.tolist() == ['done']*4 and not any(a == b == 0 for a,b in zip(seeds, seeds[1:]))

@pytest.mark.parametrize('blocks', ['model', 'world'])
def test_a_timeout_works_where_nothing_ever_waits(store, monkeypatch, blocks):
    step = World.step
    if blocks == 'world': monkeypatch.setattr(World, 'step', lambda self, action: time.sleep(.01) or step(self, action))
    dice = Dice(lambda n, p: time.sleep(.01) if blocks == 'model' else None)
    e = play(store, dice, [0], length=10_000, max_turns=1000, episode_timeout=.2).episodes
    assert e.status.tolist() == ['timeout'] and 0 < e.turns[0] < 50

def test_what_was_in_memory_is_searched_for_garbage_again_after_a_run(store):
    async def two(): await asyncio.gather(*(rollout(store, Dice(lambda n, p: asyncio.sleep(.001)), Agent('dice'), [s], run_id=f'r{s}', max_turns=3+9*s) for s in (0, 1)))
    asyncio.run(two())
    assert gc.get_freeze_count() == 0

def test_what_the_caller_kept_out_of_the_searches_stays_out(store):
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        play(store, Dice())
        assert 0 < gc.get_freeze_count() <= before
    finally: gc.unfreeze()

def test_the_manifest_holds_what_a_result_depends_on(store):
    agent = Agent('dice', history=2, max_actions=5, temperature=.3, max_tokens=99, top_p=.9, system='Play.')
    play(store, Dice(), range(2), agent, split='eval', group_size=2, seed=7)
    told = orjson.loads((store.path/'runs'/'r'/'run.json').read_bytes())
    config,versions = told['config'],told['provenance']
    assert config.pop('agent') == dict(model='dice', history=2, max_actions=5, temperature=.3, max_tokens=99, top_p=.9, system='Play.')
    assert config.pop('prompt_id') == agent.prompt_id != Agent('dice').prompt_id and config.pop('rules') == orjson.loads(orjson.dumps(asdict(DIFFICULTIES['normal'])))
    assert config == dict(model='dice', endpoint='dice', difficulty='normal', rng='pure', length=200, max_turns=6, split='eval', group_size=2, seed=7)
    assert told['planned'] == [dict(episode_id=f'r:{s}:{i}', seed=s, sample=i) for s in (0, 1) for i in (0, 1)]
    assert {k:versions[k] for k in ('synth-lab', 'crafter', 'numpy')} == {k:version(k) for k in ('synth-lab', 'crafter', 'numpy')}
    assert versions['python'] == '.'.join(map(str, sys.version_info[:3])) and store.sql('SELECT DISTINCT seed FROM calls').seed.nunique() == 24

def test_ends_by_length_and_death_and_turns(store):
    noop = Dice(lambda n, p: reply(['noop']*5))
    assert play(store, noop, [0], length=12, max_turns=None).episodes[['ended_by', 'turns', 'steps']].values.tolist() == [['length', 3, 12]]
    assert play(store, noop, [0], run_id='long', length=10_000, max_turns=None).episodes.ended_by.tolist() == ['death']
    assert play(store, noop, [0], run_id='short', max_turns=2).episodes.ended_by.tolist() == ['max_turns']

def test_nothing_is_shown_where_nobody_looks(store, capsys):
    play(store, Dice())
    assert capsys.readouterr() == ('', '')

# Replies that cannot be used

def test_an_unusable_reply_costs_a_turn_takes_no_step_and_is_told(store):
    dice = Dice(lambda n, p: reply(['jump']) if n == 2 else None)
    e, = play(store, dice, [0]).episodes.to_dict('records')
    assert (e['status'], e['turns'], e['steps'], e['unusable'], e['verdicts']) == ('done', 6, 25, 1, {'ok':5, 'invalid_action':1})
    user = [o['messages'][-1]['content'] for o in dice.sent]
    assert '"jump" is not an action' in user[2] and [o.startswith('Crafter, step') for o in user] == [True, True, False, True, True, True]
    assert user[2].endswith(user[1].rsplit('last actions:')[0].split('\n', 1)[1] + 'last actions: none')

def test_a_model_that_never_calls_the_tool_comes_to_an_end(store):
    e, = play(store, Dice(lambda n, p: reply(['do'], 'fly')), [0], length=30, max_turns=None).episodes.to_dict('records')
    assert (e['status'], e['ended_by'], e['turns'], e['steps'], e['unusable'], e['return']) == ('done', 'max_turns', 30, 0, 30, 0.)

# Failures

def failing(n, error):
    def before(i, payload):
        if i == n: raise error
    return Dice(before)

@pytest.mark.parametrize('error', [ServerError('bad gateway', status=502), BadRequest('no', status=400), TimeoutError(), ZeroDivisionError('a bug'),
    EndpointDown('gone')])
def test_one_failing_episode_leaves_seven_as_they_were(store, whole, error):
    run = play(store, failing(13, error), range(8))
    bad = run.episodes[run.episodes.status != 'done']
    assert len(bad) == 1 and bad.iloc[0].status == 'error' and bad.iloc[0].error_type == type(error).__name__
    assert bad['return'].isna().all() and bad.n_achievements.isna().all()
    seen = store.rows("""SELECT coalesce(flatten(list(unlocked ORDER BY step)), []) AS achievements
        FROM steps SEMI JOIN (FROM episodes WHERE status = 'error') USING (episode_id)""")
    assert seen == store.rows("SELECT achievements FROM episodes WHERE status = 'error'")
    good = run.episodes[run.episodes.status == 'done']
    assert same(good, whole[whole.seed.isin(good.seed)])
    assert good['return'].mean() == run.episodes['return'].mean() == store.rows('SELECT avg("return") AS m FROM episodes')[0]['m']
    failed = store.rows('SELECT verdict, http_status, error_type FROM calls WHERE error_type IS NOT NULL')
    assert failed == [dict(verdict=None, http_status=getattr(error, 'status', None), error_type=type(error).__name__)]
    assert '1 × error' in run._repr_markdown_()

def test_context_length_truncates_and_still_counts(store):
    e = play(store, failing(13, ContextLength('too long', status=400)), range(8)).episodes
    assert sorted(e.status) == ['done']*7 + ['truncated'] and e['return'].count() == 8
    assert store.rows("SELECT ended_by, error_type FROM episodes WHERE status = 'truncated'") == [dict(ended_by=None, error_type='ContextLength')]

def test_messages_that_are_too_long_before_any_turn_are_a_failure_and_no_zero(store, whole):
    e = play(store, failing(1, ContextLength('too long', status=400)), range(8)).episodes
    assert sorted(e.status) == ['done']*7 + ['error'] and e[e.status == 'error'][['return', 'n_achievements']].isna().all(axis=None)
    again = play(store, Dice(), range(8), resume=True).episodes
    assert same(again, whole) and again.attempt.tolist() == [1]*8

def test_truncated_episodes_are_in_no_mean(store, monkeypatch):
    "Neither in a run's nor in the live line's, as in no summary"
    shown = []
    monkeypatch.setattr('synth_lab.live._eyes', lambda live: (lambda: None, lambda: shown.append(str(live))))
    run = play(store, failing(3, ContextLength('too long', status=400)), range(3), concurrency=1)
    rest = run.episodes[run.episodes.status == 'done'].n_achievements.mean()
    assert rest != run.episodes.n_achievements.mean()
    cells = [o.strip() for o in str(run).splitlines()[4].split('|')]
    half = mean_ci(run.episodes[run.episodes.status == 'done'].n_achievements).hi - rest
    assert cells[2:7] == ['3', '2', '1', '0', f'{rest:.2f} ± {half:.2f} (n=2)'] and 'Not in the means: 1 × truncated (ContextLength: too long).' in str(run) and 'resume' not in str(run)
    again = play(store, Dice(), range(3), resume=True)
    assert str(again) == str(run) and summary(run.episodes)[['n', 'truncated', 'mean_achievements']].values.tolist() == [[2, 1, rest]]
    assert [o.rsplit(' · ', 1)[0] for o in shown] == [f'dice: 3/3 episodes, 1 truncated · {rest:.2f} ± {half:.2f} achievements an episode']*2

def test_an_episode_that_takes_too_long_is_given_up(store, whole):
    slow = Dice(lambda n, p: asyncio.sleep(60 if n == 13 else 0))
    e = play(store, slow, range(8), episode_timeout=3).episodes
    assert sorted(e.status) == ['done']*7 + ['timeout'] and e['return'].count() == 7
    assert e[e.status == 'timeout'][['error_type', 'error_message']].values.tolist() == [['EpisodeTimeout',
        'episode_timeout=3 s is over → raise it, or resume the run: the episode goes on from here']]
    again = play(store, Dice(), range(8), resume=True).episodes
    assert same(again, whole) and set(again.attempt) == {1}

def test_a_call_that_was_cut_off_is_in_the_trace_and_its_cost_unknown(store):
    slow = Dice(lambda n, p: asyncio.sleep(60 if n == 3 else 0))
    e = play(store, slow, [0], episode_timeout=.5).episodes
    assert e[['status', 'turns', 'calls']].values.tolist() == [['timeout', 2, 3]] and e[['input_tokens', 'cost_usd']].isna().all(axis=None)
    last = store.rows('SELECT turn, verdict, error_type, cost_usd FROM calls ORDER BY turn')[-1]
    assert last == dict(turn=3, verdict=None, error_type='CancelledError', cost_usd=None)

def test_what_is_unknown_before_a_resume_is_unknown_after_it(store):
    e = play(store, failing(3, ServerError('down')), [0]).episodes
    assert e.calls.tolist() == [3] and e[['input_tokens', 'output_tokens', 'cost_usd']].isna().all(axis=None)
    e = play(store, Dice(), [0], resume=True).episodes
    assert e[['status', 'turns', 'calls']].values.tolist() == [['done', 6, 7]] and e[['input_tokens', 'output_tokens', 'cost_usd']].isna().all(axis=None)

def test_abandoned_attempts_were_paid_for(store):
    "Three turns were played by a process that died; their record is of no use, and the episode is begun anew"
    play(store, Dice(), [0], max_turns=3)
    run, = (store.path/'runs').iterdir()
    (run/'run.json').write_bytes((run/'run.json').read_bytes().replace(b'"max_turns": 3', b'"max_turns": 6'))
    segment, = (run/'live').iterdir()
    kept = [o for o in segment.read_bytes().splitlines(True) if b'"kind":"episode_end"' not in o]
    segment.write_bytes(b''.join(kept).replace(b'"reward":0.0', b'"reward":0.5'))
    dice = Dice()
    e = play(store, dice, [0], resume=True).episodes
    assert (e.attempt.tolist(), e.calls.tolist(), len(dice.sent)) == ([2], [6], 6)
    assert e.cost_usd.tolist() == pytest.approx([.009]) and summary(e).cost_usd.tolist() == pytest.approx([.009])
    assert store.rows('SELECT round(cost_usd, 6) AS c FROM episodes_all ORDER BY attempt') == [dict(c=None), dict(c=.006)]
    segment.write_bytes(segment.read_bytes().replace(b'"cost_usd":0.001', b'"cost_usd":null', 1))
    assert store.sql('SELECT cost_usd FROM episodes').cost_usd.isna().all()

def test_the_interval_in_the_table_rests_on_worlds(store):
    run = play(store, Dice(), range(3), group_size=4)
    told = mean_ci(run.episodes.n_achievements, run.episodes.seed)
    assert f'| {told.value:.2f} ± {told.hi-told.value:.2f} (n=12) |' in str(run) and ' (n=4) |' in (alone := str(play(store, Dice(), [0], run_id='one', group_size=4)))
    assert '±' not in alone

REFUSALS = BadRequest('no', status=400),PermissionDenied('not you', status=403),EndpointSlow('too late')

@pytest.mark.parametrize('concurrency', [1, 8])
@pytest.mark.parametrize('error', REFUSALS)
def test_a_request_that_is_refused_as_the_very_first_costs_its_episode_only(store, whole, error, concurrency):
    run = play(store, failing(1, error), range(8), concurrency=concurrency)
    good = run.episodes[run.episodes.status == 'done']
    assert sorted(run.episodes.status) == ['done']*7 + ['error'] and same(good, whole[whole.seed.isin(good.seed)])
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole)

@pytest.mark.parametrize('concurrency', [1, 3, 8])
@pytest.mark.parametrize('episodes', [1, 2, 20])
@pytest.mark.parametrize('error', REFUSALS)
def test_when_no_request_is_ever_accepted_the_run_stops(store, error, episodes, concurrency):
    def never(n, p): raise error
    dice,enough = Dice(never),min(episodes, 3)
    with pytest.raises(type(error)) as e: play(store, dice, range(episodes), concurrency=concurrency, max_failures=None)
    statuses = store.sql('SELECT status FROM episodes').status.tolist()
    assert e.value is error and enough <= len(dice.sent) <= concurrency+2 and statuses.count('error') >= enough and statuses.count('planned') >= episodes-concurrency-2

def test_a_call_before_a_resume_is_a_good_one(store, whole):
    play(store, Dice(), range(8), concurrency=4, token_limit=305*10)
    def three(n, p):
        if n < 4: raise BadRequest('no', status=400)
    assert sorted(play(store, Dice(three), range(8), resume=True).episodes.status) == ['done']*5 + ['error']*3
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole)

@pytest.mark.parametrize('error,n', [(AuthError('key refused', status=401), 1), (QuotaSpent('pay first', status=429), 1), (QuotaSpent('pay first', status=429), 9), (ModelNotFoundError('no such model', status=404), 1),
    (EndpointDown('nothing there'), 1), (AuthError('key revoked', status=401), 9)])
def test_what_concerns_the_whole_run_stops_it_at_once(store, error, n):
    def before(i, payload):
        if i >= n: raise error
    dice = Dice(before)
    with pytest.raises(type(error)) as e: play(store, dice, range(50), concurrency=4)
    assert e.value is error and len(dice.sent) <= n+4
    counts = {o['status']:o['n'] for o in store.rows('SELECT status, count(*) AS n FROM episodes GROUP BY status')}
    assert counts['error'] >= 1 and counts['planned'] == 46 and store.rows('SELECT count("return") AS n FROM episodes') == [dict(n=0)]

def test_a_lab_that_cannot_be_written_stops_the_run(store, monkeypatch):
    write,left = os.write,[20]
    def full(fd, data):
        left[0] -= 1
        if left[0] < 0: raise OSError(28, 'No space left on device')
        return write(fd, data)
    monkeypatch.setattr(os, 'write', full)
    with pytest.raises(StoreError, match='No space left on device.*resume the run'): play(store, Dice(), range(8))
    monkeypatch.undo()
    assert len(play(store, Dice(), range(8), resume=True).episodes.query('status == "done"')) == 8 and once(store)

def on_disk(store): return b''.join(p.read_bytes() for p in store.path.rglob('*') if p.is_file())

def test_keys_do_not_reach_the_disk(store):
    key = 'sk-abcdefghijklmnopqrstuvwxyz123456'
    play(store, failing(2, ServerError(f'bad key {key}', status=500)))
    assert key.encode() not in on_disk(store)
    assert '[redacted]' in store.sql("SELECT error_message FROM episodes WHERE status = 'error'").error_message[0]

def test_keys_in_prompts_and_replies_do_not_reach_the_disk(store, monkeypatch):
    "Neither what looks like a key nor the value of a key variable, however deep in JSON it stands"
    shaped,own = 'sk-proj-abcdefghijklmnop123456', 'pa"ss\\word-9'
    monkeypatch.setenv('GROQ_API_KEY', own)
    told = reply(['noop'])
    message = told['choices'][0]['message']
    message['content'] = f'keys:\n{shaped} {own}'
    message['tool_calls'][0]['function']['arguments'] = orjson.dumps(dict(actions=['noop'], note=f'\n{shaped} {own}')).decode()
    agent = Agent('dice', history='full', system=f'Your keys:\n{shaped} {own}')
    play(store, Dice(lambda n, p: told), [0], agent, max_turns=2)
    assert play(store, Dice(), [0], agent, max_turns=2, resume=True).episodes.status.tolist() == ['done']
    found = on_disk(store)
    for part in (shaped, 'abcdefghijklmnop123456', own, 'word-9'): assert part.encode() not in found
    assert found.count(b'[redacted]') > 6 and once(store) and store.rows('SELECT sum(torn)::INT AS torn FROM segments') == [dict(torn=0)]
    assert lost(store) == 0

# Going on

@pytest.mark.parametrize('agent', [Agent('dice'), Agent('dice', history=2), Agent('dice', history='full'), Agent('dice', memory=True),
    Agent('dice', history='full', memory=True)])
def test_a_resumed_episode_sends_what_it_would_have_sent(tmp_path, agent):
    "Also across unusable replies, which the next prompt must mention"
    odd = lambda n, p: reply(['jump']) if p['seed'] % 3 == 0 else None
    def breaking(n, p):
        if n == 5: raise ServerError('down')
        return odd(n, p)
    straight,first,second = Dice(odd),Dice(breaking),Dice(odd)
    a = play(Store(tmp_path/'a'), straight, [7], agent, max_turns=12).episodes
    store = Store(tmp_path/'b')
    assert play(store, first, [7], agent, max_turns=12).episodes.status.tolist() == ['error']
    b = play(store, second, [7], agent, max_turns=12, resume=True).episodes
    assert [o['messages'] for o in first.sent[:4] + second.sent] == [o['messages'] for o in straight.sent]
    assert 0 < a.unusable[0] < 12
    assert a.final_hash.tolist() == b.final_hash.tolist() and a.verdicts.tolist() == b.verdicts.tolist() and b.calls.tolist() == [13] and once(store)

def test_a_reply_cut_at_the_token_limit_is_read_again_as_it_was(store):
    "Only the count of its tokens says that it was cut, so the record is read with it"
    def before(n, p):
        if n == 3: raise ServerError('down')
        if n > 1: return None
        cut = reply(['noop'])
        cut['choices'][0]['message']['tool_calls'][0]['function']['arguments'] = '{"actions": ["no'
        return cut | dict(usage=dict(prompt_tokens=300, completion_tokens=64))
    agent = Agent('dice', max_tokens=64)
    play(store, Dice(before), [0], agent)
    e, = play(store, Dice(), [0], agent, resume=True).episodes.to_dict('records')
    assert (e['status'], e['attempt'], e['verdicts']) == ('done', 1, {'truncated':1, 'ok':5})

KILLED = '''
from test_rollout import *
async def slow(n, p): await asyncio.sleep(.02); print(n, flush=True)
how = dict(max_turns=6, concurrency=5, resume=True)
agent = Agent('dice', memory=sys.argv[2] == 'memory')
if sys.argv[2] != 'sync': play(Store(sys.argv[1]), Dice(slow), range(8), agent, **how)
else: rollout_sync(Store(sys.argv[1]), Dice(slow), Agent('dice'), range(8), run_id='r', **how)
'''

def child(store, door='play'):
    env = os.environ | dict(PYTHONPATH=os.path.dirname(__file__))
    return subprocess.Popen([sys.executable, '-c', KILLED, str(store.path), door], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

def test_after_kill_9_only_what_is_missing_is_played(store, whole):
    p = child(store)
    for _ in range(29): p.stdout.readline()
    p.kill()
    p.communicate()
    segment, = (store.path/'runs'/'r'/'live').iterdir()
    segment.write_bytes(segment.read_bytes()[:-9])
    on_disk = len(store.rows('SELECT * FROM calls'))
    ended = len(store.rows("SELECT * FROM episodes WHERE status = 'done'"))
    dice = Dice()
    e = play(store, dice, range(8), concurrency=5, resume=True).episodes
    assert same(e, whole) and once(store) and e.attempt.tolist() == [1]*8
    assert 20 < on_disk and ended < 8 and len(dice.sent) == 8*6 - on_disk
    assert store.rows('SELECT count(*) AS files, sum(torn)::INT AS torn FROM segments') == [dict(files=2, torn=1)]

@pytest.mark.parametrize('door', ['play', 'sync'])
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(store, whole, door):
    p = child(store, door)
    for _ in range(33): p.stdout.readline()
    p.send_signal(signal.SIGINT)
    out,err = p.communicate(timeout=30)
    assert p.returncode != 0 and "the same call with run_id='r', resume=True" in err
    e = store.sql('SELECT * FROM episodes')
    assert set(e.status) <= {'done', 'cancelled', 'planned'} and 'cancelled' in set(e.status) and e.steps.sum() > 100
    assert e[e.status == 'cancelled']['return'].isna().all()
    dice = Dice()
    assert same(play(store, dice, range(8), concurrency=5, resume=True).episodes, whole)
    assert once(store) and store.rows("SELECT count(verdict) AS n FROM calls") == [dict(n=48)] and len(dice.sent) == 48 - e.turns.sum()
    assert {o['e'] for o in store.rows("SELECT error_type AS e FROM calls WHERE verdict IS NULL")} <= {'CancelledError'}

def test_a_run_that_was_sealed_goes_on_inside_its_episodes(store, whole):
    play(store, failing(13, ServerError('down')), range(8), token_limit=305*20)
    from synth_lab import seal
    store.seal()
    store.gc()
    assert not list((store.path/'runs'/'r'/'live').iterdir())
    dice,played = Dice(),store.sql('SELECT turns FROM episodes').turns.sum()
    e = play(store, dice, range(8), resume=True).episodes
    assert same(e, whole) and e.attempt.tolist() == [1]*8 and len(dice.sent) == 48-played and once(store)

def test_resuming_a_finished_run_calls_nobody(store):
    play(store, Dice())
    dice = Dice()
    assert play(store, dice, resume=True).episodes.status.tolist() == ['done']*4 and dice.sent == []

def test_an_end_that_was_lost_needs_no_call(store, whole):
    play(store, Dice(), range(8))
    segment, = (store.path/'runs'/'r'/'live').iterdir()
    segment.write_bytes(b''.join(o for o in segment.read_bytes().splitlines(True) if b'"kind":"episode_end"' not in o))
    dice = Dice()
    assert same(play(store, dice, range(8), resume=True).episodes, whole) and dice.sent == []

@pytest.mark.parametrize('old,new', [(b'"reward":0.0', b'"reward":0.5'), (b'"turn":2', b'"turn":3'), (b'"choices"', b'"chances"')])
def test_a_record_that_does_not_replay_is_played_anew(store, whole, old, new):
    "A reward that was not paid, a turn that is missing, replies that cannot be read"
    play(store, failing(5, ServerError('down')), [0])
    segment, = (store.path/'runs'/'r'/'live').iterdir()
    lines = segment.read_bytes().splitlines(True)
    at = [i for i,o in enumerate(lines) if b'"kind":"call"' in o][1]
    assert old in lines[at]
    lines[at] = lines[at].replace(old, new)
    segment.write_bytes(b''.join(lines))
    dice = Dice()
    e = play(store, dice, [0], resume=True).episodes
    assert same(e, whole[:1]) and e.attempt.tolist() == [2] and len(dice.sent) == 6 and once(store)
    assert store.rows('SELECT count(*) AS n FROM calls_all WHERE attempt = 1') == [dict(n=5)]

def test_a_run_goes_on_only_as_it_was_begun(store):
    play(store, Dice())
    with pytest.raises(StoreError, match='pass resume=True'): play(store, Dice())
    with pytest.raises(StoreError, match='length was 200, is 100'): play(store, Dice(), length=100, resume=True)
    with pytest.raises(StoreError, match='model was dice, is loaded'): play(store, Dice(), agent=Agent('loaded'), resume=True)
    with pytest.raises(StoreError, match='planned was'): play(store, Dice(), range(5), resume=True)
    with pytest.raises(RolloutError, match='which run'): play(store, Dice(), run_id=None, resume=True)

# What a run may use

def test_a_token_limit_stops_the_run_with_a_reason_and_it_goes_on_with_another(store, whole):
    dice = Dice(lambda n, p: asyncio.sleep(.001))
    ends = []
    run = play(store, dice, range(8), concurrency=3, token_limit=305*20, on_end=ends.append)
    e = run.episodes
    assert sorted((o.seed, o.status) for o in ends) == e[['seed', 'status']].apply(tuple, axis=1).tolist()
    assert set(e.status) == {'done', 'cancelled'} and 20 <= len(dice.sent) <= 22 and e.calls.sum() == len(dice.sent)
    assert (e[e.status == 'cancelled'].error_type == 'LimitReached').all() and e[e.status == 'cancelled']['return'].isna().all()
    used = int((e.input_tokens + e.output_tokens).sum())
    assert run.stopped == f'token_limit=6,100 is reached: {used:,}' and used == 305*len(dice.sent)
    assert set(e[e.status == 'cancelled'].error_message) == {'token_limit=6,100 is reached → resume the run with a higher limit'} and 'Stopped: token_limit=6,100' in str(run) and once(store)
    assert (e[e.turns == 0][['cost_usd', 'calls']] == 0).all(axis=None) and (e.turns == 0).any() and store.rows('SELECT count(*) AS n FROM calls WHERE verdict IS NULL') == [dict(n=0)]
    again = play(store, Dice(), range(8), resume=True, token_limit=305*20)
    assert again.stopped.startswith('token_limit') and again.episodes.calls.sum() == len(dice.sent)
    rest = Dice()
    whole_run = play(store, rest, range(8), resume=True, token_limit=10**6)
    assert same(whole_run.episodes, whole, ['calls', 'input_tokens', 'cost_usd']) and len(dice.sent) + len(rest.sent) == 48
    assert whole_run.stopped is None and 'Stopped' not in str(whole_run) and once(store)

@pytest.mark.parametrize('limit,calls', [(.0095, 10), (.010, 10), (1., 48)])
def test_a_cost_limit_counts_dollars(store, limit, calls):
    dice = Dice()
    run = play(store, dice, range(8), concurrency=1, cost_limit=limit)
    assert len(dice.sent) == calls and (run.stopped is None) == (calls == 48)

def test_a_time_limit_lets_calls_under_way_finish(store):
    dice = Dice(lambda n, p: asyncio.sleep(.3))
    run = play(store, dice, range(8), concurrency=4, time_limit=.4)
    assert len(dice.sent) == 8 and run.episodes.turns.tolist() == [2]*4 + [0]*4 and run.stopped == 'time_limit=0.4 s is over'
    assert set(run.episodes.status) == {'cancelled'}

def test_a_limit_does_not_leave_begun_episodes_running(store):
    "Two were cut off by a killed process; the next call may use nothing, and their ends are written all the same"
    play(store, Dice(), range(2), max_turns=6)
    segment, = (store.path/'runs'/'r'/'live').iterdir()
    segment.write_bytes(b''.join(o for o in segment.read_bytes().splitlines(True) if b'"kind":"episode_end"' not in o and b'"turn":6' not in o))
    assert store.sql('SELECT status FROM episodes').status.tolist() == ['running']*2
    e = play(store, Dice(), range(2), resume=True, token_limit=10).episodes
    assert e[['status', 'turns', 'attempt', 'error_type']].values.tolist() == [['cancelled', 5, 1, 'LimitReached']]*2

def test_what_the_server_does_not_say_counts_as_the_dearest(store):
    silent = lambda n, p: reply(['noop']) | dict(usage=None) if n % 2 else None
    dice = Dice(silent)
    assert play(store, dice, range(8), concurrency=1, token_limit=305*10).stopped and len(dice.sent) == 10
    mute = Dice(lambda n, p: reply(['noop']) | dict(usage=None))
    run = play(store, mute, range(8), run_id='mute', concurrency=1, token_limit=10**9)
    assert run.stopped == '8 replies did not say what they used, so token_limit cannot be kept' and len(mute.sent) == 8
    assert set(run.failed.error_message) == {f'{run.stopped} → resume the run without token_limit; a time_limit can be kept'}
    assert play(store, Dice(), range(8), run_id='mute', resume=True, time_limit=60).stopped is None

def test_replies_from_the_cache_use_nothing(store):
    class Kept(Dice):
        async def post(self, payload): return (await super().post(payload))[0],[]
    run = play(store, Kept(), range(4), token_limit=1, cost_limit=.001)
    assert run.stopped is None and run.episodes.cost_usd.tolist() == [0.]*4 and run.episodes.input_tokens.tolist() == [1800]*4
    assert store.rows('SELECT DISTINCT cached, attempts, cost_usd FROM calls') == [dict(cached=True, attempts=0, cost_usd=0.)]

def test_a_cost_that_nobody_knows_cannot_be_limited(store):
    class Unpriced(Dice):
        def cost(self, model, usage): return None
    with pytest.raises(RolloutError, match=r"price of 'dice' at dice.*\[prices.dice\] in settings.ini"): play(store, Unpriced(), cost_limit=1)
    with pytest.raises(RolloutError, match='set token_limit'): play(store, AsyncInferenceClient(base_url='http://127.0.0.1:9/v1'), cost_limit=1)
    assert not store.path.exists()

@pytest.mark.parametrize('how', [dict(token_limit=0), dict(cost_limit=-1), dict(time_limit='1'), dict(cost_limit=True), dict(max_failures=2.5), dict(processes=0)])
def test_limits_that_cannot_be_meant_are_refused(store, how):
    with pytest.raises(RolloutError, match=next(iter(how))): play(store, Dice(), **how)
    assert not store.path.exists()

def test_failures_in_a_row_stop_the_run_with_the_last_reason(store, whole):
    def down(n, p):
        if n > 10: raise ServerError(f'bad gateway {n}', status=502)
    dice = Dice(down)
    with pytest.raises(RolloutError, match="3 episodes in a row .* ServerError: bad gateway 13.*run_id='r', resume=True"):
        play(store, dice, range(8), concurrency=1, max_failures=3)
    assert len(dice.sent) == 13 and sorted(store.sql('SELECT status FROM episodes').status) == ['done'] + ['error']*3 + ['planned']*4
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole)

def test_failures_with_good_calls_between_them_do_not_stop_the_run(store):
    def often(n, p):
        if n % 3 == 0: raise ServerError('now and then')
    run = play(store, Dice(often), range(8), concurrency=1, max_failures=2)
    assert run.episodes.status.tolist() == ['error']*8 and run.stopped is None
    assert play(store, Dice(often), range(50), run_id='any', max_failures=None, concurrency=1).episodes.status.tolist() == ['error']*50

# What a run says while it runs

def test_each_turn_and_each_end_is_told(store):
    turns,ends = [],[]
    run = play(store, failing(13, ServerError('down')), range(4), on_turn=turns.append, on_end=ends.append)
    calls = store.rows("""SELECT episode_id, turn, verdict, thought, list_transform(steps, lambda s: s."action") AS actions, list_transform(steps, lambda s: s.effect) AS effects,
        flatten(list_transform(steps, lambda s: s.unlocked)) AS unlocked, list_sum(list_transform(steps, lambda s: s.reward)) AS reward, cost_usd, latency_ms
        FROM events WHERE kind = 'call' AND verdict IS NOT NULL ORDER BY episode_id, turn""")
    told = [[o.episode_id, o.turn, o.verdict, o.thought, [*o.actions], [*o.effects], [*o.unlocked], pytest.approx(o.reward), o.cost, o.latency_ms]
        for o in sorted(turns, key=lambda o: (o.episode_id, o.turn))]
    assert [[*o.values()] for o in calls] == told and len(told) == run.episodes.turns.sum() and {o.tokens for o in turns} == {305}
    assert sorted((o.episode_id, o.status, o.turns, [*o.achievements]) for o in ends) == run.episodes[['episode_id', 'status', 'turns']].assign(
        a=run.episodes.achievements.map(list)).apply(tuple, axis=1).tolist()
    assert [(o.error_type, o.error_message) for o in ends if o.status == 'error'] == [('ServerError', 'down')] and {o.seed for o in ends} == set(range(4))

@pytest.mark.parametrize('callback', ['on_turn', 'on_end'])
def test_an_error_in_a_callback_stops_the_run_with_that_error(store, whole, callback):
    heard = []
    def call(event):
        heard.append(event)
        if len(heard) == 3: raise ZeroDivisionError('mine')
    with pytest.raises(ZeroDivisionError, match='mine'): play(store, Dice(), range(8), concurrency=4, **{callback:call})
    assert not {'error', 'running'} & set(store.sql('SELECT status FROM episodes').status)
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole) and once(store)

def test_a_callback_may_be_a_coroutine(store):
    heard = []
    async def call(event):
        await asyncio.sleep(.001)
        heard.append(event.turn)
    play(store, Dice(), [0], on_turn=call)
    assert heard == [1, 2, 3, 4, 5, 6]

def test_a_stream_yields_turns_ends_and_the_run(store, whole):
    async def read(): return [o async for o in stream(store, Dice(), Agent('dice'), range(8), run_id='r', max_turns=6)]
    *events,run = asyncio.run(read())
    assert [type(o).__name__ for o in events].count('TurnEvent') == 48 and [type(o).__name__ for o in events].count('EpisodeEvent') == 8
    assert same(run.episodes, whole)

def test_a_slow_reader_slows_the_run(store):
    dice = Dice()
    async def read():
        events = stream(store, dice, Agent('dice'), range(64), run_id='r', max_turns=40, concurrency=64)
        await anext(events)
        await asyncio.sleep(.3)
        await events.aclose()
    asyncio.run(read())
    assert len(dice.sent) < 100+2*64+8

def test_leaving_a_stream_stops_the_run(store, whole, capsys):
    dice = Dice()
    async def read():
        events = stream(store, dice, Agent('dice'), range(8), run_id='r', max_turns=6, concurrency=4)
        async for o in events:
            if len(dice.sent) > 20: break
        await events.aclose()
    asyncio.run(read())
    assert set(store.sql('SELECT status FROM episodes').status) <= {'done', 'cancelled', 'planned'} and "run_id='r', resume=True" in capsys.readouterr().err
    rest = Dice()
    assert same(play(store, rest, range(8), resume=True).episodes, whole) and len(dice.sent) + len(rest.sent) <= 48+4 and once(store)

@pytest.mark.parametrize('name', ['on_turn', 'on_end'])
def test_a_stream_has_no_callbacks_and_says_so_at_once(store, name):
    with pytest.raises(RolloutError, match=f'calls no {name} → leave out {name}'): stream(store, Dice(), Agent('dice'), range(8), **{name:print})

def test_a_stream_raises_what_the_run_raises(store):
    async def read(): return [o async for o in stream(store, Dice(down), Agent('dice'), range(8), run_id='r')]
    def down(n, p): raise EndpointDown('nothing there')
    with pytest.raises(EndpointDown, match='nothing there'): asyncio.run(read())

def test_a_stream_that_is_left_raises_what_the_run_had_raised(store):
    def revoked(n, p):
        if n == 3: raise AuthError('key revoked', status=401)
    async def read():
        events = stream(store, Dice(revoked), Agent('dice'), range(8), run_id='r')
        await anext(events)
        await asyncio.sleep(.05)
        await events.aclose()
    with pytest.raises(AuthError, match='key revoked'): asyncio.run(read())

# Memory

def told(sent): return parse(sent['messages'][-1]['content']).remembered

def test_an_agent_with_a_memory_is_told_what_came_into_view_at_every_step(store):
    dice = Dice()
    play(store, dice, [3], Agent('dice', memory=True), max_turns=30)
    world,memory = World(3, length=200),Memory()
    actions = iter(store.rows('SELECT actions FROM calls ORDER BY turn'))
    for o in dice.sent:
        assert told(o) == observe(world, 200, memory).remembered
        for name in next(actions)['actions']:
            world.step(ACTIONS.index(name))
            memory.see(world.window(), column_row(world.player.pos))
    assert told(dice.sent[-1]).places and told(dice.sent[0]).places == ()

def test_a_memory_changes_two_lines_of_the_prompt_and_nothing_else(tmp_path):
    plain,remembering = Dice(),Dice()
    runs = [play(Store(tmp_path/o.model), client, [3], o, max_turns=20) for o,client in ((Agent('dice'), plain), (Agent('dice-2', memory=True), remembering))]
    assert runs[0].episodes.final_hash.tolist() == runs[1].episodes.final_hash.tolist()
    for a,b in zip(plain.sent, remembering.sent):
        text,longer = a['messages'][-1]['content'].split('\n'),b['messages'][-1]['content'].split('\n')
        assert [o for o in longer if not o.startswith(('remembered, ', 'unexplored: '))] == text and len(longer) == len(text)+2
        assert b['messages'][0]['content'].startswith(a['messages'][0]['content'])

def test_after_kill_9_an_agent_remembers_what_it_had_seen(store):
    "The process dies in the middle of four episodes; what is sent afterwards is what would have been sent"
    p = child(store, 'memory')
    for _ in range(29): p.stdout.readline()
    p.kill()
    p.communicate()
    straight,after,agent = Dice(),Dice(),Agent('dice', memory=True)
    play(store, after, range(8), agent, resume=True)
    play(Store(store.path.parent/'whole'), straight, range(8), agent)
    sent = {(o['seed'], o['messages'][-1]['content']) for o in straight.sent}
    assert 0 < len(after.sent) < len(straight.sent) and {(o['seed'], o['messages'][-1]['content']) for o in after.sent} < sent
    assert all(told(o) for o in after.sent) and any(told(o).places for o in after.sent) and once(store)

def test_a_memory_at_any_step_of_a_trace_is_that_of_the_agent(store):
    dice,id = Dice(),'r:3:0'
    run = play(store, dice, [3], Agent('dice', memory=True), max_turns=12)
    assert rerun(store, id).exact and run.episodes.status.tolist() == ['done'] and len(film(store, id, 63)) == run.episodes.steps[0]+1
    for turn,o in enumerate(dice.sent): assert seen(store, id, 5*turn).recall() == told(o)
    assert observe(fork(store, id, 20), 200, seen(store, id, 20)) == replace(look(fork(store, id, 20), 200), remembered=told(dice.sent[4]))
    with pytest.raises(RolloutError, match='has steps 0 to'): seen(store, id, 500)

# Pictures

@pytest.mark.parametrize('how', [dict(), dict(history=2), dict(history='full'), dict(history='full', image_only_mode=True)])
def test_a_resumed_episode_sends_the_same_pictures(tmp_path, how):
    agent = Agent('dice', use_vision=True, image_size=90, **how)
    def breaking(n, p):
        if n == 5: raise ServerError('down')
    straight,first,second = Dice(),Dice(breaking),Dice()
    play(Store(tmp_path/'a'), straight, [7], agent, max_turns=8)
    store = Store(tmp_path/'b')
    play(store, first, [7], agent, max_turns=8)
    assert play(store, second, [7], agent, max_turns=8, resume=True).episodes.attempt.tolist() == [1]
    assert [o['messages'] for o in first.sent[:4] + second.sent] == [o['messages'] for o in straight.sent]
    shown = [m['content'] for m in second.sent[-1]['messages'] if m['role'] == 'user']
    pictures = [part['image_url']['url'] for content in shown for part in content if part['type'] == 'image_url']
    assert len(pictures) == {'none':1, 2:3, 'full':8}[agent.history] and {o[:22] for o in pictures} == {'data:image/png;base64,'}

def test_only_pictures_that_are_shown_are_drawn_again(store, monkeypatch):
    agent = Agent('dice', use_vision=True, image_size=90, history=2)
    play(store, failing(6, ServerError('down')), [7], agent, max_turns=6)
    drawn,frame = [],World.frame
    monkeypatch.setattr(World, 'frame', lambda self, size: drawn.append(self.step_count) or frame(self, size))
    play(store, Dice(), [7], agent, max_turns=6, resume=True)
    assert drawn == [15, 20, 25]

def test_a_run_from_before_new_settings_goes_on(store, whole):
    "Its `run.json` knows six of the agent's settings"
    play(store, failing(13, ServerError('down')), range(8))
    config = orjson.loads((store.path/'runs'/'r'/'run.json').read_bytes())['config']
    assert set(config['agent']) == {'model', 'history', 'max_actions', 'temperature', 'max_tokens', 'system'}
    with pytest.raises(StoreError, match='agent was'): play(store, Dice(), range(8), agent=Agent('dice', top_p=.5), resume=True)
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole)

# Several processes

class Far(Dice):
    "A client that goes to other processes; `trouble` is one of theirs, and happens on the process' call number `at`"
    def __init__(self, trouble=None, at=5, wait=0., mark=None):
        super().__init__(self.meet)
        self.trouble,self.at,self.wait,self.mark = trouble,at,wait,mark

    def meet(self, n, payload):
        if n < self.at or not self.trouble: return asyncio.sleep(self.wait)
        if self.trouble == 'one killed' and os.path.exists(self.mark): return asyncio.sleep(self.wait)
        if self.trouble == 'one killed': open(self.mark, 'x').close()
        if 'killed' in self.trouble: os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == 'key': raise AuthError('key revoked', 'set KEY', status=401)
        if self.trouble == 'refused' or self.trouble == 'refused once' and n == self.at: raise BadRequest('no', status=400)
        if self.trouble == 'once' and n == self.at: raise ServerError('bad gateway', status=502)

def test_processes_play_the_same_games(store, whole):
    heard,ends = [],[]
    run = play(store, Far(), range(8), processes=2, concurrency=4, on_turn=heard.append, on_end=ends.append)
    assert same(run.episodes, whole, ['calls', 'input_tokens', 'cost_usd']) and once(store) and run.stopped is None
    assert sorted((o.seed, o.turn) for o in heard) == [(s, t) for s in range(8) for t in range(1, 7)] and len(ends) == 8
    assert sorted(o.name.split('-')[0] for o in (store.path/'runs'/'r'/'live').iterdir()) == ['process0', 'process1']

def test_a_process_that_dies_leaves_its_episodes_for_a_resume(store, whole):
    with pytest.raises(RolloutError, match='no process is left: process .* died with code -9, 2 of its episodes are unfinished;'):
        play(store, Far('killed'), range(8), processes=2, concurrency=4)
    played = store.rows('SELECT count(*) AS n FROM calls')[0]['n']
    heard = []
    again = play(store, Far(), range(8), processes=2, concurrency=4, resume=True, on_turn=heard.append)
    assert same(again.episodes, whole) and again.episodes.attempt.tolist() == [1]*8 and once(store) and len(heard) == 48-played

def test_others_go_on_when_one_process_dies(store, whole, tmp_path):
    run = play(store, Far('one killed', wait=.01, mark=str(tmp_path/'mark')), range(8), processes=2, concurrency=4)
    e = run.episodes
    assert sorted(e.status) == ['done']*6 + ['running']*2 and same(e[e.status == 'done'], whole[whole.seed.isin(e[e.status == 'done'].seed)])
    assert re.fullmatch('process .* died with code -9, 2 of its episodes are unfinished', run.stopped) and run.stopped in str(run)
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole) and once(store)

def test_what_concerns_the_whole_run_stops_all_processes(store, whole):
    with pytest.raises(AuthError, match='key revoked') as e: play(store, Far('key'), range(8), processes=2, concurrency=4)
    assert (e.value.fix, e.value.status) == ('set KEY', 401) and 'running' not in set(store.sql('SELECT status FROM episodes').status)
    assert same(play(store, Far(), range(8), processes=2, resume=True).episodes, whole)

def test_one_failing_episode_in_a_process_leaves_the_others(store, whole):
    e = play(store, Far('once', 9), range(8), processes=2).episodes
    good = e[e.status == 'done']
    assert sorted(e.status) == ['done']*6 + ['error']*2 and same(good, whole[whole.seed.isin(good.seed)])

def test_a_request_refused_as_the_first_of_its_process_costs_its_episode_only(store, whole):
    e = play(store, Far('refused once', 1), range(8), processes=2, concurrency=4).episodes
    good = e[e.status == 'done']
    assert sorted(e.status) == ['done']*6 + ['error']*2 and same(good, whole[whole.seed.isin(good.seed)])

def test_when_no_process_is_ever_accepted_the_run_stops(store):
    with pytest.raises(BadRequest): play(store, Far('refused', 1), range(20), processes=2, concurrency=4, max_failures=None)
    assert store.sql('SELECT status FROM episodes').status.tolist().count('planned') > 8

def test_when_a_process_cannot_be_started_the_others_are_seen_off(store, monkeypatch):
    began,start = [],subprocess.Popen
    def second(*args, **kw):
        if began: raise OSError(11, 'Resource temporarily unavailable')
        began.append(start(*args, **kw))
        return began[0]
    monkeypatch.setattr(subprocess, 'Popen', second)
    with pytest.raises(RolloutError, match='cannot be started: Resource temporarily unavailable.*fewer'): play(store, Far(), processes=2)
    monkeypatch.undo()
    assert began[0].poll() == 0 and play(store, Dice(), resume=True).episodes.status.tolist() == ['done']*4

def test_a_limit_holds_over_all_processes(store, whole):
    run = play(store, Far(wait=.02), range(8), processes=2, concurrency=4, token_limit=305*15)
    calls = run.episodes.calls.sum()  # three others may be under way when the last one is answered
    assert 15 <= calls <= 18 and run.stopped == f'token_limit=4,575 is reached: {305*calls:,}' and set(run.episodes.status) <= {'done', 'cancelled'}
    assert play(store, Far(), range(8), processes=2, concurrency=4, token_limit=305*15, resume=True).episodes.calls.sum() == calls
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole)

def test_an_error_in_a_callback_reaches_the_processes(store):
    def call(event): raise ZeroDivisionError('mine')
    with pytest.raises(ZeroDivisionError, match='mine'): play(store, Far(wait=.01), range(8), processes=2, on_turn=call)
    e = store.sql('SELECT status, error_type, error_message FROM episodes')
    assert not {'error', 'running'} & set(e.status) and e[['error_type', 'error_message']].dropna().drop_duplicates().values.tolist() == [['ZeroDivisionError', 'mine']]

def test_a_client_that_cannot_leave_the_process_is_refused(store):
    with pytest.raises(RolloutError, match='cannot go to another process.*pass its URL'): play(store, AsyncInferenceClient(app=lambda *o: 0), processes=2)
    with pytest.raises(RolloutError, match='cannot go to another process'): play(store, Dice(lambda n, p: None), processes=2, max_turns=1)
    assert not store.path.exists()

def test_a_client_goes_to_another_process_without_its_connections(tmp_path, monkeypatch):
    client = AsyncInferenceClient('key-1', 'http://127.0.0.1:9/v1', cache=tmp_path/'replies')
    async def used(): return client.gate
    asyncio.run(used())
    there = pickle.loads(pickle.dumps(client))
    assert (repr(there.endpoint), there._key, there.cache.path) == (repr(client.endpoint), 'key-1', client.cache.path)

SHARED = '''
from test_rollout import *
if __name__ == '__main__':
    how = dict(max_turns=6, concurrency=4, resume=True, processes=2, on_turn=lambda e: print(e.turn, flush=True))
    rollout_sync(Store(sys.argv[1]), Far(wait=.1), Agent('dice'), range(8), run_id='r', **how)
'''

def workers(store): return [p for p in psutil.process_iter(['cmdline']) if 'synth_lab.rollout import child' in ' '.join(p.info['cmdline'] or ()) and
    any(str(store.path) in o.path for o in p.open_files())]

def shared(store):
    "A process that plays with two others, after 15 turns"
    env = os.environ | dict(PYTHONPATH=os.path.dirname(__file__))
    p = subprocess.Popen([sys.executable, '-c', SHARED, str(store.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    for _ in range(15): p.stdout.readline()
    assert len(workers(store)) == 2
    return p

def test_after_kill_9_of_the_parent_nobody_goes_on_and_a_resume_plays_what_is_missing(store, whole):
    p = shared(store)
    p.kill()
    p.communicate()
    psutil.wait_procs(workers(store), timeout=5)
    assert workers(store) == []
    played = store.rows('SELECT count(*) AS n FROM calls WHERE verdict IS NOT NULL')[0]['n']
    dice = Dice()
    assert same(play(store, dice, range(8), resume=True).episodes, whole) and len(dice.sent) == 48-played and 15 <= played < 48 and once(store)

def test_ctrl_c_reaches_the_processes(store, whole):
    p = shared(store)
    p.send_signal(signal.SIGINT)
    out,err = p.communicate(timeout=20)
    assert p.returncode != 0 and "run_id='r', resume=True" in err and workers(store) == []
    e = store.sql('SELECT * FROM episodes')
    assert set(e.status) <= {'done', 'cancelled', 'planned'} and 'cancelled' in set(e.status)
    assert same(play(store, Dice(), range(8), resume=True).episodes, whole) and once(store)

def test_whoever_writes_a_run_seals_its_full_segments():
    "A process that was started for a run imports this room and no other"
    code = 'from synth_lab.rollout import child; from synth_lab.traces import RunWriter; print(RunWriter.rotated.__module__)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == 'synth_lab.seal\n'

# Looking at it again

@pytest.fixture(scope='module')
def long(tmp_path_factory):
    "A lab with one episode of 1010 steps, long enough for two keyframes, and its world after each step"
    store = Store(tmp_path_factory.mktemp('long')/'lab')
    quiet = Dice(lambda n, p: reply(random.Random(n).choices(['move_left', 'move_right', 'move_up', 'move_down', 'do', 'sleep'], k=8)))
    rules = replace(DIFFICULTIES['peaceful'], hunger=9999, thirst=9999, fatigue=9999)
    e, = play(store, quiet, [3], run_id='long', length=1010, max_turns=None, difficulty=rules).episodes.to_dict('records')
    world,hashes = World(3, difficulty=rules, length=1010),[]
    hashes.append(world.state_hash())
    for o in store.rows('SELECT "action" FROM steps ORDER BY step'):
        world.step(ACTIONS.index(o['action']))
        hashes.append(world.state_hash())
    assert e['steps'] == len(hashes)-1 == 1010 and store.rows('SELECT count(keyframe) AS n FROM calls') == [dict(n=2)]
    return store,hashes

@pytest.mark.parametrize('step', [0, 1, 333, 499, 500, 501, 505, 1001, 1010])
def test_a_fork_is_the_world_after_any_step(long, step):
    "Before, between and behind the keyframes, which stand at the ends of turns"
    store,hashes = long
    world = fork(store, 'long:3:0', step)
    assert (world.step_count, world.state_hash()) == (step, hashes[step])
    if step < 1010: world.step(0)
    assert fork(store, 'long:3:0', step).state_hash() == hashes[step]

def test_a_late_fork_starts_at_a_keyframe(long, monkeypatch):
    store,_ = long
    played,step = [],World.step
    monkeypatch.setattr(World, 'step', lambda self, action: played.append(action) or step(self, action))
    fork(store, 'long:3:0', 1009)
    assert len(played) < 10

@pytest.mark.parametrize('step', [-1, 1011, 2.5, '3', None])
def test_a_step_that_was_not_played_cannot_be_forked(long, step):
    with pytest.raises(RolloutError, match='has steps 0 to 1010'): fork(long[0], 'long:3:0', step)

def test_episodes_that_are_not_there_are_named(long):
    for look in (rerun, film, lambda store, id: fork(store, id, 0)):
        with pytest.raises(RolloutError, match='no episode `long:3:1`.*did you mean `long:3:0`'): look(long[0], 'long:3:1')

def test_what_was_imported_without_its_world_cannot_be_played_again(store):
    step = dict(tool_calls=[], info=dict(meta={}))
    run, = import_rollout(store, dict(run_id='x', trajectories=[dict(steps=[step])])).runs
    id, = store.sql('SELECT episode_id FROM episodes').episode_id
    for look in (rerun, film, lambda store, id: fork(store, id, 5)):
        with pytest.raises(RolloutError, match=f'`{id}` was imported: no world steps and no settings of the worlds were recorded'): look(store, id)

@pytest.mark.parametrize('every,frames', [(1, 1011), (10, 102), (1009, 3), (5000, 2)])
def test_a_film_has_its_first_and_last_moment(long, every, frames):
    shown = film(long[0], 'long:3:0', size=36, every=every)
    assert len(shown) == frames and shown[0].shape == (36, 36, 3)
    assert (shown[-1] == fork(long[0], 'long:3:0', 1010).frame(36)).all() and shown.gif()[:6] == b'GIF89a'

def tamper(store, key, change):
    "Change field `key` of the step in the middle; its number"
    segment, = (store.path/'runs'/'r'/'live').iterdir()
    lines = [orjson.loads(o) for o in segment.read_bytes().splitlines()]
    steps = [s for o in lines for s in o.get('steps') or []]
    at = next(s for s in steps[len(steps)//2:] if s['effect'] == 'moved')
    n,at[key] = at['step'],change
    segment.write_bytes(b''.join(orjson.dumps(o) + b'\n' for o in lines))
    return n

@pytest.mark.parametrize('key,change,told', [('reward', .5, '`reward` was 0.5, is 0.0'), ('effect', 'turned', "`effect` was 'turned', is 'moved'"),
    ('action', 'noop', "`effect` was 'moved', is 'nothing happened'"), ('action', 'fly', '`action` was'), ('step', 7000, '`step` was '),
    ('unlocked', ['eat_cow'], "`unlocked` was ['eat_cow'], is []"), ('health', 1, '`health` was 1'), ('terminated', True, '`terminated` was True, is False')])
def test_a_rerun_names_the_step_that_was_tampered_with(store, key, change, told):
    play(store, Dice(), [0], max_turns=20)
    exact = rerun(store, 'r:0:0')
    assert exact.exact and exact.steps == 100 and 'exactly as recorded' in repr(exact)
    step = tamper(store, key, change)
    found = rerun(store, 'r:0:0')
    assert found.divergence.startswith(f'step {step}: ') and told in found.divergence and (found.exact, found.steps) == (False, step-1)

OWN = replace(DIFFICULTIES['easy'], bite=9, hunger=3, zombie=replace(DIFFICULTIES['easy'].zombie, first=.9, fewest=(6, -3), most=(6, -3)))

@pytest.mark.parametrize('difficulty,name', [('hard', 'hard'), (DIFFICULTIES['hard'], 'hard'), (OWN, OWN.hash)])
def test_an_episode_is_played_again_by_the_rules_of_its_run(store, monkeypatch, difficulty, name):
    run = play(store, failing(4, ServerError('down')), range(2), difficulty=difficulty, max_turns=20)
    assert set(run.episodes.difficulty) == {name} and sorted(run.episodes.status) == ['done', 'error']
    e = play(store, Dice(), range(2), difficulty=difficulty, max_turns=20, resume=True).episodes
    assert e.status.tolist() == ['done']*2 and e.attempt.tolist() == [1]*2
    monkeypatch.delitem(DIFFICULTIES, 'hard')
    for seed in (0, 1):
        world = World(seed, difficulty=OWN if name == OWN.hash else HARD, length=200)
        for o in store.rows('SELECT "action" FROM steps WHERE episode_id = ? ORDER BY step', f'r:{seed}:0'): world.step(ACTIONS.index(o['action']))
        assert rerun(store, f'r:{seed}:0').exact and fork(store, f'r:{seed}:0', world.step_count).config_hash == world.config_hash
        assert fork(store, f'r:{seed}:0', world.step_count).state_hash() == world.state_hash() == e.final_hash[seed]

def test_a_run_goes_on_only_by_its_own_rules(store):
    play(store, Dice(), difficulty=OWN)
    with pytest.raises(StoreError, match='difficulty was .*rules was'): play(store, Dice(), difficulty=replace(OWN, bite=8), resume=True)

def test_a_run_without_rules_in_its_config_has_those_of_its_name(store):
    play(store, Dice(), [0], difficulty='hard')
    file = store.path/'runs'/'r'/'run.json'
    old = orjson.loads(file.read_bytes())
    del old['config']['rules']
    file.write_bytes(orjson.dumps(old))
    assert rerun(Store(store.path), 'r:0:0').exact and fork(Store(store.path), 'r:0:0', 0).difficulty == 'hard'

# What is refused before anything is written

@pytest.mark.parametrize('error,kw', [*[(RolloutError, dict(seeds=o)) for o in ([], [1, 1], [-1], [1, 'x'], [True])],
    *[(RolloutError, {k:n}) for k,n in dict(concurrency=0, group_size=0, length=0, max_turns=0).items()], (RolloutError, dict(length=2.5)),
    (RolloutError, dict(max_turns=-1)), (WorldError, dict(difficulty='impossible')), (StoreError, dict(run_id='a/b'))])
def test_nonsense_is_refused_before_anything_is_written(store, error, kw):
    with pytest.raises(error): play(store, Dice(), **kw)
    assert not store.path.exists()

def test_it_runs_from_a_script_a_notebook_and_inside_a_coroutine(store, whole):
    def sync(run_id): return rollout_sync(store, Dice(), Agent('dice'), range(8), run_id=run_id, max_turns=6)
    async def notebook(): return sync('inside')
    assert same(asyncio.run(notebook()).episodes, whole)
    assert same(sync('script').episodes, whole)


@pytest.mark.parametrize('how, said', [
    (dict(seeds=5), r'such as seeds=range\(5\)'), (dict(episode_timeout='2'), 'seconds above 0'), (dict(episode_timeout=0), 'seconds above 0'),
    (dict(run_id=7), 'cannot name a folder'), (dict(run_id=''), "run_id is '', expected a name"), (dict(split=3), 'split is 3, expected a name'),
    (dict(seed='x'), "seed is 'x', expected a whole number"), (dict(seed=1.5), 'seed is 1.5'), (dict(seed=None), 'seed is None'),
    (dict(on_turn=3), 'on_turn is 3, expected a function'), (dict(on_end='x'), "on_end is 'x', expected a function")])
def test_what_cannot_be_meant_is_refused_before_anything_is_written(store, how, said):
    with pytest.raises(LabError, match=said): rollout_sync(store, Dice(), Agent('dice'), **dict(seeds=range(2)) | how)
    assert store.rows('SELECT run_id FROM runs') == []


def test_a_checkpoint_of_another_spec_ends_the_run(tmp_path):
    from synth_lab import Lab
    from synth_lab.client import BadRequest
    from synth_lab.policies import init_weights, save_checkpoint
    lab = Lab(tmp_path/'lab', endpoint='local')
    config = save_checkpoint(lab.models_path, 'ft:student:job_1', init_weights(8))/'config.json'
    config.write_text(config.read_text().replace('"features": "', '"features": "other-'))
    with pytest.raises(BadRequest, match='was trained on features other-.*train it again'): lab.rollout_sync('ft:student:job_1', range(2), length=5)


def test_one_tool_call_that_the_server_could_not_read_costs_its_episode_only(store):
    "Even as the very first answer: the next episode may fare better"
    from synth_lab.client import ToolUseFailed
    run = play(store, failing(1, ToolUseFailed('Failed to call a function', status=400)), range(3), concurrency=1)
    assert sorted(run.episodes.status) == ['done', 'done', 'error']


def test_a_loop_that_ends_with_its_client_leaves_no_connection_open(tmp_path, caplog):
    with serving(mock()) as url: asyncio.run(rollout(Store(tmp_path), AsyncInferenceClient(base_url=url), Agent('mock'), range(4), length=20))
    gc.collect()
    assert 'Unclosed' not in caplog.text
